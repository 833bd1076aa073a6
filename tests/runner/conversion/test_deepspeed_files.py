"""DeepSpeed checkpoints are read as DeepSpeed's own tool reads them, without executing pickled code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runner import checkpoint as checkpoints
from runner.commands.convert import run
from runner.conversion import deepspeed_files
from runner.errors import ConfigError
from runner.launch import run_ranks


def test_blocks_of_a_parameter_in_runs():
    tensor = torch.arange(60.0).reshape(3, 4, 5)
    flat = (
        torch.cat([torch.full((3,), -1.0), tensor.reshape(-1)[:23]]),
        torch.cat([tensor.reshape(-1)[23:], torch.ones(2)]),
    )
    runs = (deepspeed_files.FlatRun(flat[0], 3, 23), deepspeed_files.FlatRun(flat[1], 0, 37))
    opened = deepspeed_files.DeepSpeed({"x": deepspeed_files.Flat((3, 4, 5), runs)})
    for block in [
        ((0, 3), (0, 4), (0, 5)),
        ((1, 3), (0, 4), (0, 5)),
        ((0, 3), (1, 3), (0, 5)),
        ((0, 2), (0, 4), (2, 4)),
        ((2, 3), (3, 4), (4, 5)),
        ((1, 1), (0, 4), (0, 5)),
    ]:
        assert opened.read("model/x", block).equal(tensor[tuple(slice(*bounds) for bounds in block)])
    assert opened.read("model/x").equal(tensor)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_weights_are_those_of_deepspeeds_own_tool(tmp_path, stage):
    (tmp_path / "run").mkdir()
    expected = run_ranks(
        "deepspeed_entries:save",
        {"stage": stage, "folder": str(tmp_path / "saved")},
        world_size=2,
        run_dir=tmp_path / "run",
        device="cpu",
        timeout=60,
        threads=1,
    )
    assert run([str(tmp_path / "saved"), str(tmp_path / "merged")]) == 0
    opened = checkpoints.read(tmp_path / "merged")
    assert set(opened.names) == {"embed.weight", "inner.weight", "inner.bias", "outer.weight", "frozen", "scale"}
    for name in set(opened.names) & set(expected):  # the tool omits frozen parameters at stage 1
        assert opened.read(f"model/{name}").float().equal(expected[name].float()), name
    assert set(opened.names) - set(expected) == ({"frozen"} if stage == 1 else set())


def saved(folder: Path, **more: object) -> Path:
    folder.mkdir()
    state = {"module": {"w": torch.ones(4)}, "buffer_names": [], "param_shapes": [{"w": torch.Size([4])}]}
    torch.save(state, folder / "mp_rank_00_model_states.pt")
    for rank in range(2):
        parts = [torch.arange(2.0) + 2 * rank]
        content = {"zero_stage": 1, "partition_count": 2, "single_partition_of_fp32_groups": parts, **more}
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
