"""A dataset that gives a host the time to come back."""

import time

from networks import Points


class Slow(Points):
    def __getitem__(self, index):
        time.sleep(0.006)
        return super().__getitem__(index)
