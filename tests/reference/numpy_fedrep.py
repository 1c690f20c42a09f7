"""Slow twin of FedRep (Collins et al., arXiv:2102.07078)."""

from reference.numpy_fedper import FedPer
from reference.numpy_perfedmask import train_some


class FedRep(FedPer):
    """x = train(join(w, own_k), head only); w_k = train(x, body only), of which the body travels."""

    def __init__(self, weights, own, sizes, sgd, head_share):
        super().__init__(weights, own, sizes, sgd)
        self.head_share = head_share
        self.body = [name for name in weights if name not in own]

    def work(self, received, batches):
        turn = round(self.head_share * len(batches))
        between = train_some(received, batches[:turn], self.own, **self.sgd)
        return train_some(between, batches[turn:], self.body, **self.sgd)

    def finetuned(self, client, batches):
        return train_some(self.personal(client), batches, self.own, **self.sgd)
