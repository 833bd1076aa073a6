"""Which optimizers update slices of parameters as complete ones: most of torch's do, those that take norms do not."""

from types import SimpleNamespace

import pytest
import torch

from strategies.core.errors import StrategyError
from strategies.optimizer.elementwise import ELEMENTWISE, STEPS, check_slices, is_elementwise, is_separate

CPU = torch.device("cpu")
SHAPES = [(2, 8), (7,), (6, 2, 3, 3)]


class ByNorm(torch.optim.Optimizer):
    """Steps in proportion to the norm of a parameter (LARS) after the first `warm_up` ones, or of all gradients."""

    def __init__(self, groups, of_gradients=False, lr=0.1, warm_up=0):
        super().__init__(groups, {"lr": lr})
        self.of_gradients, self.lr, self.left = of_gradients, lr, warm_up

    @torch.no_grad()
    def step(self):
        everything = [parameter for group in self.param_groups for parameter in group["params"]]
        total = torch.stack([parameter.grad.norm() for parameter in everything]).norm()
        for parameter in everything:
            ratio = 1 / total if self.of_gradients else parameter.norm() / parameter.grad.norm()
            parameter -= self.lr * (1 if self.left > 0 else ratio) * parameter.grad
        self.left -= 1


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("kind", sorted(ELEMENTWISE, key=str))
def test_those_of_torch_update_slices_as_complete_parameters(kind, flat):
    options = {"lr": 0.1, "weight_decay": 0.1} if kind is not torch.optim.Rprop else {}
    assert all(is_elementwise(kind, options, CPU, shape, flat=flat) for shape in SHAPES)


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("lr", [0.1, 1e-6])
@pytest.mark.parametrize(("of_gradients", "warm_up"), [(True, 0), (False, 0), (False, STEPS // 2)])
def test_those_by_norms_do_not(of_gradients, warm_up, lr, flat):
    assert not is_elementwise(lambda groups: ByNorm(groups, of_gradients, lr, warm_up), {}, CPU, (2, 8), flat=flat)


class Clipped(torch.optim.SGD):
    """Clips the norm of all gradients, as LAMB does."""

    def __init__(self, groups, bound):
        super().__init__(groups, lr=0.1)
        self.bound = bound

    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], self.bound)
        super().step(closure)


@pytest.mark.parametrize("bound", [1.0, 30.0, 1e5])
def test_those_that_clip_larger_gradients_do_not(bound):
    assert not is_elementwise(lambda groups: Clipped(groups, bound), {}, CPU, (2, 8), flat=True)
    assert not is_separate(lambda groups: Clipped(groups, bound), {}, CPU)


def projected(parameter):
    """Gradients at nearly right angles to their parameter (AdamP)."""
    gradient, bound = parameter.grad, 0.1 / parameter.numel() ** 0.5
    if torch.cosine_similarity(gradient.flatten(), parameter.flatten(), dim=0).abs() < bound:
        gradient -= parameter * (gradient * parameter).sum() / parameter.square().sum()


def damped(parameter):
    """Small gradients (AdamS)."""
    norm = parameter.grad.norm()
    parameter.grad *= norm / (norm + 1e-4)


def small_at_first(parameter):
    """Steps that are too small for single precision (Prodigy)."""
    parameter.grad *= 1e-7 / parameter.grad.norm()


class Changed(torch.optim.SGD):
    def __init__(self, groups, change):
        super().__init__(groups, lr=0.1)
        self.change = change

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.change(parameter)
        super().step(closure)


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("change", [projected, damped, small_at_first], ids=lambda one: one.__name__)
def test_those_that_few_gradients_show_do_not(change, flat):
    assert not is_elementwise(lambda groups: Changed(groups, change), {}, CPU, (2, 8), flat=flat)


def test_those_of_single_precision_are_tried_in_it():
    def halved(parameter):
        assert parameter.dtype == torch.float32
        parameter.grad *= 0.5

    assert is_elementwise(lambda groups: Changed(groups, halved), {}, CPU, (2, 8), flat=True)


class Centred(torch.optim.SGD):
    """Gradients less the means of their rows."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.grad -= parameter.grad.mean(-1, keepdim=True)
        super().step(closure)


def test_those_by_rows_do_not():
    assert not is_elementwise(Centred, {"lr": 0.1}, CPU, (2, 8), flat=False)


def test_those_by_shape_do_not():
    assert not is_elementwise(torch.optim.Adafactor, {"lr": 0.1}, CPU, (2, 8), flat=True)


class Factored(torch.optim.SGD):
    """Divides gradients by the means of their rows, of matrices of at least 16 x 16."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.dim() == 2 and min(parameter.shape) >= 16:
                parameter.grad /= parameter.grad.abs().mean(-1, keepdim=True)
        super().step(closure)


@pytest.mark.parametrize(("rows", "refused"), [(8, False), (16, True), (40_000, True)])
def test_parameters_of_the_shapes_of_the_model_are_tried(rows, refused):
    weight = SimpleNamespace(id="w", name="a", spec=SimpleNamespace(shape=(rows, 24)))
    program = SimpleNamespace(parameters=(weight,), layouts={"w": SimpleNamespace(axes=())})

    def check():
        check_slices(lambda groups: Factored(groups, lr=0.1), GROUPS, program, stage=1, device=CPU, staged=False)

    if refused:
        with pytest.raises(StrategyError, match="tried out"):
            check()
    else:
        check()


GROUPS = [{"names": ["a"]}]
COMPLETE = SimpleNamespace(parameters=())
"""A program of whose parameters none is sliced."""


@pytest.mark.parametrize(("of_gradients", "refused"), [(True, True), (False, False)])
def test_stages_of_a_pipeline_update_some_of_the_parameters(of_gradients, refused):
    def check(staged):
        check_slices(
            lambda groups: ByNorm(groups, of_gradients),
            [{"names": ["a"]}],
            COMPLETE,
            stage=0,
            device=CPU,
            staged=staged,
        )

    check(staged=False)
    if refused:
        with pytest.raises(StrategyError, match="all of a group"):
            check(staged=True)
    else:
        check(staged=True)


@pytest.mark.parametrize("kind", [*sorted(ELEMENTWISE, key=str), torch.optim.Adafactor])
def test_those_of_torch_update_some_parameters_as_all(kind):
    assert is_separate(kind, {}, CPU)


class Paired(torch.optim.SGD):
    """Two matrices that can be multiplied share the norm of their gradients."""

    def step(self, closure=None):
        parameters = self.param_groups[0]["params"]
        for one, other in zip(parameters[::2], parameters[1::2], strict=False):
            if one.dim() == 2 and one.shape[-1] == other.shape[0]:
                norm = one.grad.norm() + other.grad.norm()
                one.grad /= norm
                other.grad /= norm
        super().step(closure)


@pytest.mark.parametrize(("stage", "staged"), [(0, True), (1, False)])
def test_pairs_of_matrices_are_no_separate_parameters(stage, staged):
    with pytest.raises(StrategyError, match="all of a group"):
        check_slices(Paired, GROUPS, COMPLETE, stage=stage, device=CPU, staged=staged)


def test_zero_flattens_parameters_on_one_rank_too():
    with pytest.raises(StrategyError, match="flattens"):
        check_slices(ByNorm, GROUPS, COMPLETE, stage=1, device=CPU, staged=True)
