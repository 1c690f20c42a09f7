"""Sums of updates under masks: the server learns the sum of a round's updates, with the bytes of the plain sum.

The protocol is that of Bonawitz et al. 2017 ("Practical secure aggregation for privacy-preserving machine learning",
CCS), over the integers that the plain sum adds. The files, each of which imports only those before it:

- `shamir`: shares of a secret;
- `masks`: keys that two parties agree on, and streams of masks;
- `signing`: signatures with the long-term keys of nodes;
- `policy`: threshold and least coverage;
- `messages`: what parties and server send;
- `party`, `session`: the two sides of one sum;
- `vectors`, `headers`, `support`: the integers of an update as a vector of words, and which of them are sent;
- `client_sum`: the terms of one client in one sum;
- `node`, `server`: the two sides of a round's merge, and `local`, both in one process;
- `obstacles`: methods and options that cannot be summed under masks.
"""
