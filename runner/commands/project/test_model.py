"""Is it still the same training? `make test`, or `python -m unittest`."""

import unittest

import meshwright
import torch

from data import Spirals
from model import Net


class TestModel(unittest.TestCase):
    def setUp(self) -> None:
        torch.manual_seed(0)
        self.module = Net()
        data = Spirals(rows=64)
        self.batch = data.points, data.classes

    def test_scores_have_a_column_per_class(self) -> None:
        self.assertEqual(self.module(self.batch[0]).shape, (64, 3))

    def test_four_ranks_compute_what_one_device_does(self) -> None:
        """Loss and every gradient, on simulated ranks; an error names the tensor that differs."""
        plan = meshwright.plan(self.module, self.batch, loss=torch.nn.functional.cross_entropy, mesh={"dp": 2, "tp": 2})
        self.assertTrue(meshwright.verify(self.module, self.batch, plan).passed)


if __name__ == "__main__":
    unittest.main()
