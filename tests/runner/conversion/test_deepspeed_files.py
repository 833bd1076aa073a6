"""DeepSpeed checkpoints are read as DeepSpeed's own tool reads them, without executing pickled code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from runner import checkpoint as checkpoints
from runner.commands.convert import run
from runner.conversion import deepspeed_files
from runner.errors import ConfigError
from tests.ranks import start_ranks


def test_blocks_of_a_parameter_over_two_ranks(tmp_path):
    tensor = torch.arange(60.0).reshape(3, 4, 5)
    parts = [tensor.reshape(-1)[:23], torch.cat([tensor.reshape(-1)[23:], torch.ones(2)])]
    opened = deepspeed_files.read(saved(tmp_path / "saved", tensor.shape, parts))
    for block in [
        ((0, 3), (0, 4), (0, 5)),
        ((1, 3), (0, 4), (0, 5)),
        ((0, 3), (1, 3), (0, 5)),
        ((0, 2), (0, 4), (2, 4)),
        ((2, 3), (3, 4), (4, 5)),
        ((1, 1), (0, 4), (0, 5)),
    ]:
        assert opened.read("model/w", block).equal(tensor[tuple(slice(*bounds) for bounds in block)])
    assert opened.read("model/w").equal(tensor)


def test_partitions_with_too_few_elements_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="7 elements for a parameter of shape") as caught:
        deepspeed_files.read(saved(tmp_path / "saved", (2, 4), [torch.ones(4), torch.ones(3)]))
    assert caught.value.code == "MW611"


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_weights_are_those_of_deepspeeds_own_tool(tmp_path, stage):
    (tmp_path / "run").mkdir()
    expected = start_ranks(
        "deepspeed_entries:save", {"stage": stage, "folder": str(tmp_path / "saved")}, 2, tmp_path / "run", timeout=60
    )
    assert run([str(tmp_path / "saved"), str(tmp_path / "merged")]) == 0
    opened = checkpoints.read(tmp_path / "merged")
    assert set(opened.names) == {"embed.weight", "inner.weight", "inner.bias", "outer.weight", "frozen", "scale"}
    for name in set(opened.names) & set(expected):  # the tool omits frozen parameters at stage 1
        assert opened.read(f"model/{name}").float().equal(expected[name].float()), name
    assert set(opened.names) - set(expected) == ({"frozen"} if stage == 1 else set())


PARTS = [torch.tensor([0.0, 1.0]), torch.tensor([2.0, 3.0])]


def saved(folder: Path, shape: Sequence[int] = (4,), parts: Sequence[torch.Tensor] = PARTS, **more: object) -> Path:
    """What DeepSpeed saves at stage 1 of a parameter `w` whose elements the ranks have in `parts`."""
    folder.mkdir()
    state = {"module": {"w": torch.ones(shape)}, "buffer_names": [], "param_shapes": [{"w": torch.Size(shape)}]}
    torch.save(state, folder / "mp_rank_00_model_states.pt")
    for rank, part in enumerate(parts):
        content = {"zero_stage": 1, "partition_count": 2, "single_partition_of_fp32_groups": [part], **more}
        torch.save({"optimizer_state_dict": content}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return folder


def test_partitions_follow_each_other(tmp_path):
    found = deepspeed_files.read(saved(tmp_path / "saved"))
    assert found.read("model/w").tolist() == [0.0, 1.0, 2.0, 3.0]


def test_code_in_a_file_is_not_run(tmp_path):
    with pytest.raises(ConfigError, match="could run code"):
        deepspeed_files.read(saved(tmp_path / "saved", hook=print))


def test_a_missing_rank_is_reported(tmp_path):
    folder = saved(tmp_path / "saved")
    (folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(ConfigError, match="saved by 2 ranks, but has the states of 1"):
        deepspeed_files.read(folder)


def test_other_parallelism_is_refused(tmp_path):
    folder = saved(tmp_path / "saved")
    torch.save({}, folder / "mp_rank_01_model_states.pt")
    with pytest.raises(ConfigError, match=r"mp_rank_01_model_states\.pt belongs to tensor"):
        deepspeed_files.read(folder)


def test_latest_names_the_folder(tmp_path):
    saved(tmp_path / "global_step2")
    (tmp_path / "latest").write_text("global_step2\n", encoding="utf-8")
    assert deepspeed_files.folder_of(tmp_path) == tmp_path / "global_step2"
    (tmp_path / "latest").write_text("../elsewhere", encoding="utf-8")
    assert deepspeed_files.folder_of(tmp_path) is None
