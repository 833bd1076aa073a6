"""Training from pretrained weights: in every mode, the first loss and gradients equal those of the module with these
weights; names that do not match are reported before any rank starts."""

import re
from pathlib import Path

import made_checkpoints as made
import networks
import pytest
import torch
from safetensors.torch import save_file
from small import DOUBLE, HYBRID, MODES, SMALL
from torch import nn
from torch.nn import functional

from runner.build import pretrained
from runner.config.schema import Model
from runner.errors import ConfigError, RunFailed
from strategies.core.errors import StrategyError
from strategies.runtime.tensor_files import TensorReader


def described(weights, rename=(), new=()):
    return Model(target="a.B", args={}, config=None, weights=str(weights), rename=tuple(rename), new=tuple(new))


def other_weights(seed=5):
    """A classifier whose weights no seed of a run produces."""
    torch.manual_seed(seed)
    return networks.Classifier()


def first_loss(module):
    samples = [networks.Points()[row] for row in order_of_the_first_step()]
    x, y = (torch.stack([torch.as_tensor(sample[part]) for sample in samples]) for part in (0, 1))
    return functional.cross_entropy(module.double()(x.double()), y).item()


def order_of_the_first_step():
    from runner.data.order import Order

    return Order(64, 16, 0).rows(0)


@pytest.fixture
def file(tmp_path):
    save_file(other_weights().state_dict(), tmp_path / "other.safetensors")
    return tmp_path / "other.safetensors"


@pytest.mark.parametrize("mode", ["stand_alone", "semi_auto"])
def test_the_first_loss_is_that_of_the_file(start, file, mode):
    ended = start(*SMALL, *MODES[mode], DOUBLE, f"model.weights={file}", "train.steps=1")
    assert ended.losses == [pytest.approx(first_loss(other_weights()), rel=1e-12)]


def test_verified(start, file, tmp_path):
    torch.save({"model": {f"net.{name}": one for name, one in other_weights().state_dict().items()}}, tmp_path / "a.pt")
    words = (f"model.weights={tmp_path / 'a.pt'}", "model.rename=[['^net[.]','']]", "verify.steps=2", DOUBLE)
    ended = start(*SMALL, *MODES["auto"], *words, verb="verify")
    assert ended.verdict["passed"]
    assert torch.load(tmp_path / "a.pt")["model"]["net.inner.weight"].shape == (16, 12)


def test_a_hybrid_module_takes_its_slices(start, file):
    reference = ("verify.reference.target=networks.Classifier", "verify.steps=1", DOUBLE)
    ended = start(*SMALL, *HYBRID, *reference, f"model.weights={file}", verb="verify")
    assert ended.verdict["passed"]
    log = (ended.folder / "ranks" / "0.log").read_text(encoding="utf-8")
    shown = float(re.search(r"step 1/1  loss (\S+)", log).group(1))
    assert shown == pytest.approx(first_loss(other_weights()), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("words", [("parallel.zero.stage=3",), ("parallel.zero.stage=1", "train.precision=bf16")])
def test_zero_starts_there_too(start, file, words):
    ended = start(*SMALL, *MODES["semi_auto"], *words, f"model.weights={file}", "train.steps=1")
    assert ended.losses == [pytest.approx(first_loss(other_weights()), rel=2e-2 if len(words) > 1 else 1e-6)]


class Tied(nn.Module):
    """Tied weights, a persistent and a non-persistent buffer, and a counter buffer."""

    def __init__(self):
        super().__init__()
        self.emb, self.head = nn.Embedding(5, 4), nn.Linear(4, 5)
        self.head.weight = self.emb.weight
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("angles", torch.zeros(3), persistent=False)


def state():
    return {name: tensor.clone() for name, tensor in Tied().state_dict().items()}


def found(content, folder, rename=(), new=()):
    torch.save(content, folder / "w.pt")
    return pretrained.locate(described(folder / "w.pt", rename, new), Tied())


def test_every_name_is_found_once_whatever_it_is_called(tmp_path):
    names = {"emb.weight", "head.bias", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"}
    names |= {"norm.num_batches_tracked"}
    assert found(state(), tmp_path).keys() == names
    for alias in ("emb.weight", "head.weight"):  # the other name of the tied weight may be missing
        content = {name: one for name, one in state().items() if name != alias}
        kept = found(content, tmp_path)
        assert kept.keys() == names and kept["emb.weight"].key in content
    assert "angles" not in found(state() | {"angles": torch.ones(9)}, tmp_path)  # made by the constructor
    prefixed = {f"module.{name}": one for name, one in state().items()}
    renamed = found(prefixed, tmp_path, [("^module[.]", "")])
    assert TensorReader().block(renamed["head.bias"]).equal(prefixed["module.head.bias"])


@pytest.mark.parametrize("before, after", [("module.", ""), ("", "body."), ("model.", "net.body.")])
def test_the_suggested_rename_cures_another_prefix(tmp_path, before, after):
    """The suggested `rename` makes the file load."""
    module = nn.Module()
    owner = module
    for part in filter(None, after.split(".")):
        owner.add_module(part, nn.Module())
        owner = getattr(owner, part)
    owner.enter, owner.leave = nn.Linear(3, 4), nn.Linear(4, 2)
    module.top = nn.Linear(2, 2)
    content = {f"{before}{name}": one for name, one in owner.state_dict().items() if not name.startswith("top")}
    content |= {f"{before if not after else ''}top.{name}": one for name, one in module.top.state_dict().items()}
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(ConfigError, match="Only a prefix differs") as caught:
        pretrained.locate(described(tmp_path / "w.pt"), module)
    rename = re.search(r"model\.rename=\[\['(.*)', '(.*)'\]\]\.$", str(caught.value)).groups()
    assert len(pretrained.locate(described(tmp_path / "w.pt", [rename]), module)) == 6


FAULTS = [
    (lambda s: s.pop("norm.weight"), "the files do not have norm.weight, which the model needs. Nearest to norm."),
    (lambda s: (s.pop("emb.weight"), s.pop("head.weight")), "the files do not have emb.weight, which the model needs"),
    (lambda s: s.update({"head.baias": s.pop("head.bias")}), "Nearest to head.bias is head.baias"),
    (lambda s: s.update(more=torch.ones(1)), "the files have more, which the model does not know."),
    (lambda s: s.update({"head.bias": torch.ones(6)}), "head.bias has shape [6] there, but head.bias of the model has"),
    (lambda s: s.update({"head.bias": torch.ones(5, dtype=torch.int32)}), "stored as int32; the model holds floating"),
    (lambda s: s.update({"norm.num_batches_tracked": torch.tensor(1.0)}), "the model holds integer numbers"),
    (lambda s: s["head.weight"].add_(1), "one tensor for emb.weight and head.weight (tied weights), but emb.weight"),
]


@pytest.mark.parametrize("fault, message", FAULTS, ids=[message[:40] for _, message in FAULTS])
def test_weights_that_do_not_match_are_reported(tmp_path, fault, message):
    content = state()
    fault(content)
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        found(content, tmp_path)
    assert str(caught.value).startswith("model.weights = ") and "\n" not in str(caught.value)


def test_two_tensors_cannot_get_one_name(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.rename gives emb\.weight and head\.weight the same name, x\.weight"):
        found(state(), tmp_path, [("^(emb|head)", "x")])


def test_a_class_says_what_may_be_missing_or_left_over(tmp_path, monkeypatch):
    monkeypatch.setattr(Tied, "_keys_to_ignore_on_load_missing", [r"norm\.running"], raising=False)
    monkeypatch.setattr(Tied, "_keys_to_ignore_on_load_unexpected", {"masked_bias$"}, raising=False)
    content = {name: one for name, one in state().items() if "running" not in name}
    kept = found(content | {"head.masked_bias": torch.ones(1)}, tmp_path)
    assert "norm.running_mean" not in kept and len(kept) == 5


def test_what_is_new_is_not_read_and_what_has_no_name_is_left_out(tmp_path):
    every = set(found(state(), tmp_path))
    assert set(found(state(), tmp_path, new=["norm.running_*"])) == every - {"norm.running_mean", "norm.running_var"}
    other = state() | {"head.bias": torch.ones(9), "mlm.bias": torch.ones(2)}  # another head, and one too many
    kept = found(other, tmp_path, [("^mlm[.].*", "")], ["head.bias"])
    assert set(kept) == every - {"head.bias"}
    del other["head.bias"]
    assert found(other, tmp_path, [("^mlm[.].*", "")], ["head.b*"]).keys() == kept.keys()
    tied = found(state(), tmp_path, new=["head.weight"])  # one tensor: under its other name it is new too
    assert "emb.weight" not in tied
    with pytest.raises(ConfigError, match=r"model\.new\[0\] = 'haed\.\*' matches no parameter") as caught:
        found(state(), tmp_path, new=["haed.*"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("model.weights=nowhere.pt",), "nowhere.pt: there is no such file or folder."),
        (("model.weights=other.pt",), "the files do not have inner.weight, inner.bias, outer.weight (1 more), which"),
        (("model.weights=other.pt", "model.rename=[['(','']]"), "which is no regular expression: missing )"),
        (("model.rename=[[a,b]]",), "give model.weights too."),
        (("model.new=[inner.*]",), "give model.weights too, or drop model.new."),
        (("model.config={width: 3}",), "has no config class as the models of transformers have"),
    ],
)
def test_the_command_refuses(command, tmp_path, words, message):
    Path(tmp_path / "own_net.py").write_text(Path(networks.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    torch.save({"x": torch.ones(2)}, tmp_path / "other.pt")
    target = (word.replace("networks.", "own_net.") for word in SMALL)
    done = command(*target, "parallel=data_parallel", *words, "hydra.run.dir=out")
    assert done.code == 2 and len(done.paragraphs) == 1 and message in done.err
    assert not (tmp_path / "out" / "ranks" / "1.log").exists()


@pytest.mark.few(1)
@pytest.mark.parametrize("verb", ["train", "predict"])
def test_weights_by_which_forward_decides_otherwise_are_refused(start, tmp_path, verb):
    model = networks.Deep()
    words = (*SMALL, *MODES["data_parallel"], "model.target=networks.Deep", "train.steps=1")
    for depth in (2, 3):
        model.depth.fill_(depth)
        given = [f"model.weights={tmp_path / 'weights.pt'}"]
        if verb == "predict":
            tensors = {f"model/{name}": tensor.detach() for name, tensor in model.state_dict().items()}
            given = [f"predict.checkpoint={made.checkpoint(tmp_path / f'made-{depth}', tensors)}"]
        torch.save(model.state_dict(), tmp_path / "weights.pt")
        if depth == 2:
            start(*words, *given, verb=verb, folder="same")
            continue
        with pytest.raises((StrategyError, RunFailed)) as refused:
            start(*words, *given, verb=verb)
        assert refused.value.code == "MW909" and "depth" in str(refused.value)
