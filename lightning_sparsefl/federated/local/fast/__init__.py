"""The fast engine: Lightning's fit and evaluation loops for clients that train for seconds, bit-equal to a Trainer."""
