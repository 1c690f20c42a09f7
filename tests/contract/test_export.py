"""An exported model loads into the user's module and scores as in the run."""

import torch

from helpers.algorithms import every_algorithm, rows
from lightning_sparsefl.wire import load_sparse


@every_algorithm
def test_what_is_exported_loads_into_the_users_module_and_scores_as_in_the_run(algorithm, federation):
    trainer = federation(algorithm, rounds=2)
    scored = {row["client"]: row for row in rows(trainer.run_folder / "clients.csv") if row["round"] == "1"}
    for client in (None, 1):
        arguments = {"client": client, "check": True}
        exported = federation(algorithm, rounds=2, verb="export", ckpt_path="last", arguments=arguments).summary
        expected = trainer.summary["global/val_acc"] if client is None else float(scored["1"]["personal/val_acc"])
        assert exported.scores == {name: {"val_acc": expected} for name in ("in memory", "ckpt", "safetensors")}
        state = torch.load(exported.files["ckpt"], weights_only=True)["state_dict"]
        module = federation.module()
        changed = state.keys() != module.state_dict().keys()
        assert changed == any("call `algorithm.adapt(module)`" in note for note in exported.notes)
        if changed:
            algorithm.adapt(module)
            module.load_state_dict(state, strict=True)
        else:
            module = federation.module.load_from_checkpoint(exported.files["ckpt"], weights_only=True)
        sparse = load_sparse(exported.files["safetensors"])
        assert all(torch.equal(sparse[name], value) for name, value in module.state_dict().items())
