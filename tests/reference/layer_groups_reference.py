"""Slow twin of `lightning_sparsefl.sparse.layer_groups`: each tensor is asked for its group, and only names answer.

Nothing is imported from the package. A tree of modules is never built: a module is a prefix of names, and what is in it
is looked up among all names each time.
"""

from __future__ import annotations

from fnmatch import fnmatchcase


def below(names, path):
    """What comes after `path` in each name inside of it, as lists of keys."""
    keys = path.split(".") if path else []
    return [name.split(".")[len(keys) :] for name in names if name.split(".")[:-1][: len(keys)] == keys]


def children(names, path):
    return {rest[0] for rest in below(names, path) if len(rest) > 1}


def has_own(names, path):
    return any(len(rest) == 1 for rest in below(names, path))


def child(path, key):
    return f"{path}.{key}" if path else key


def stem(key):
    """`block_` of `block_3`, `block1-` of `block1-3`, nothing of `3`, None of what has no number."""
    digits = len(key) - len(key.rstrip("0123456789"))
    before = key[: len(key) - digits]
    return before if digits and (before == "" or before.endswith(("_", "-"))) else None


def numbered(path):
    return stem(path.split(".")[-1]) is not None


def is_list(names, path):
    stems = {stem(key) for key in children(names, path)}
    return not has_own(names, path) and len(stems) == 1 and None not in stems


def with_children(names, path):
    return [key for key in children(names, path) if children(names, child(path, key))]


def divided(names, path):
    if not children(names, path):
        return False
    if is_list(names, path):
        return not numbered(path) or len(with_children(names, path)) == len(children(names, path))
    lists = [child(path, key) for key in children(names, path) if is_list(names, child(path, key))]
    deeper = any(divided(names, child(path, key)) for key in children(names, path))
    return not numbered(path) and (deeper or any(with_children(names, inner) for inner in lists))


def home(names, name):
    """The layer or block that a tensor is in; its own name if a divided module holds it."""
    path = ""
    while len(children(names, path)) == 1 and not has_own(names, path):
        (key,) = children(names, path)
        path = child(path, key)
    first, keys = path, name.split(".")
    while path == first or divided(names, path):
        if not children(names, path):
            return path
        depth = len(path.split(".")) if path else 0
        path = child(path, keys[depth])
        if path == name:
            return name
    return path


def owner(name):
    return ".".join(name.split(".")[:-1])


def layer_groups(dims, patterns=()):
    """Names by group; `dims` are the tensors' numbers of dimensions by name."""
    everything = list(dims)
    taken = {name: next((p for p in patterns if fnmatchcase(name, p)), None) for name in everything}
    left = [name for name in everything if taken[name] is None]
    homes = {name: home(left, name) for name in left}
    groups, layer = {}, None
    for path in dict.fromkeys(homes.values()):
        members = [name for name in left if homes[name] == path]
        block = bool(children(left, path)) and path not in left
        bare = not block and max(dims[name] for name in members) < 2
        follows = layer is not None and everything.index(members[0]) == everything.index(groups[layer][-1]) + 1
        if bare and follows and owner(path) == owner(layer):
            groups[layer] += members
        else:
            groups[path] = members
            layer = None if block or bare else path
    for pattern in patterns:
        groups[pattern] = [name for name in everything if taken[name] == pattern]
    return dict(sorted(groups.items(), key=lambda group: everything.index(group[1][0])))


def head_of(dims):
    """The tensors beside the last matrix."""
    last = [name for name in dims if dims[name] == 2][-1]
    return [name for name in dims if owner(name) == owner(last)]
