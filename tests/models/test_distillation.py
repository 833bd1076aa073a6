"""Distillation: the loss beside its definition, and a teacher that nothing changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models.distillation import Distillation, DistillationLoss


def test_the_loss_is_that_of_its_definition():
    torch.manual_seed(0)
    student, teacher, label = torch.randn(5, 3), torch.randn(5, 3), torch.tensor([0, 1, 2, 0, 1])
    own, taught = (student / 4).softmax(1), (teacher / 4).softmax(1)
    divergence = (taught * (taught / own).log()).sum(1).mean()
    hard = -student.softmax(1)[range(5), label].log().mean()
    loss = DistillationLoss(temperature=4.0, soft=0.3)((student, teacher), label)
    assert torch.allclose(loss, 0.7 * hard + 0.3 * 16 * divergence)
    for given in ({"temperature": 0.0}, {"soft": 1.5}):
        with pytest.raises(ValueError, match="temperature"):
            DistillationLoss(**given)


def test_the_teacher_stays_as_it_is():
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3)) for _ in range(2)]
    model = Distillation(*nets).train()
    assert model.student.training and not any(one.training for one in model.teacher.modules())
    before = {name: one.clone() for name, one in model.teacher.state_dict().items()}
    x = torch.randn(8, 4)
    student, teacher = model(x)
    assert torch.equal(teacher, model(x)[1]) and not torch.equal(student, model(x)[0])
    DistillationLoss()((student, teacher), torch.zeros(8, dtype=torch.int64)).backward()
    assert all(one.grad is None for one in model.teacher.parameters())
    assert all(one.grad is not None for one in model.student.parameters())
    assert all(torch.equal(before[name], one) for name, one in model.teacher.state_dict().items())
