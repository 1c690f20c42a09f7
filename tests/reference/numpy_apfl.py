"""Slow twin of APFL (Deng et al., arXiv:2003.13461)."""

from reference.numpy_network import copied, gradient, train, weighted_mean


def mixed(v, w, share):
    return {name: share * v[name] + (1 - share) * w[name] for name in w}


class APFL:
    """FedAvg's w_k; v <- v - lr a grad f(a v + (1 - a) w), at the w before each step; once a round a moves too."""

    def __init__(self, weights, sizes, sgd, alpha, adaptive=False):
        self.weights, self.start, self.sizes, self.sgd = copied(weights), copied(weights), sizes, sgd
        self.alpha, self.adaptive, self.own = alpha, adaptive, {}

    def round(self, batches):
        trained = {}
        for k in batches:
            path = [copied(self.weights)]

            def noted(weights, step, path=path):
                path.append(copied(weights))
                return weights

            trained[k] = train(self.weights, batches[k], after=noted, **self.sgd)
            self.own[k] = self.mix(k, path, batches[k])
        self.weights = weighted_mean(trained, self.sizes)

    def mix(self, k, path, batches):
        v, share, _ = self.own.get(k, (copied(self.start), self.alpha, None))
        for step, (x, y) in enumerate(batches):
            w = path[step]
            slopes = gradient(mixed(v, w, share), x, y)
            along = sum(((v[name] - w[name]) * slopes[name]).sum() for name in v)
            v = {name: v[name] - self.sgd["lr"] * share * slopes[name] for name in v}
            if self.adaptive and step == 0:
                share = min(1.0, max(0.0, share - self.sgd["lr"] * along))
        return v, share, mixed(v, path[-1], share)

    def personal(self, client):
        return self.own[client][2] if client in self.own else self.weights
