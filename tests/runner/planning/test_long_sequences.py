"""Sequences that one device cannot hold: they fit when attention is sliced along the sequence, and the ring sends as
many bytes as the gather."""

from __future__ import annotations

import json

import pytest

ATTENTION = "layers.*.attention.scaled_dot_product_attention"
LONG = (
    "+recipe=gpt_long",
    "cluster=dgx_h100",
    "world_size=8",
    "data.args.length=131072",
    "data.batch_size=1",
    "model.args={vocabulary: 32000, length: 131072, width: 4096, layers: 4, heads: 32}",
    "model.args.dropout=0",
    "model.args.attention_dropout=0",
    "train.precision=bf16",
    "parallel.recompute.operators=none",
    "parallel.memory_limit=83GB",
    "parallel.mesh={cp: 8}",
)
SLICED = (
    "parallel.dataset_strategy=[[1, 8], [1, 8]]",
    f"parallel.strategies={{{ATTENTION}: [[1, 1, 8, 1], [1, 1, 8, 1], [1, 1, 8, 1]]}}",
)


@pytest.mark.parametrize("how", ["gather", pytest.param("ring", marks=pytest.mark.slow)])
def test_128k_tokens_fit_on_8_devices_with_sliced_sequences_only(command, tmp_path, how):
    limit = f"+data.args.cache={tmp_path}"
    replicated = f"parallel.strategies={{{ATTENTION}: [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]]}}"
    gathered = command(
        "plan", *LONG, limit, replicated, "parallel.mode=semi_auto", "parallel.dataset_strategy=full_batch"
    )
    assert gathered.code == 2 and "[MW501]" in gathered.err, gathered.err
    sliced = command("plan", *LONG, *SLICED, limit, f"parallel.context_parallel={how}")
    assert sliced.code == 0, sliced.err


@pytest.mark.slow
@pytest.mark.parametrize("how", ["gather", "ring"])
def test_bytes_of_both_exchanges(command, tmp_path, how):
    """Keys and values [2, 4, 512, 16] in fp32: 3 quarters of both arrive in forward, and again where the layer is
    recomputed, and their gradients leave in backward; around the ring they arrive a third time there. There halves of
    queries, keys, values and results are swapped, in backward those of results twice."""
    run = tmp_path / "run"
    done = command("plan", "+recipe=gpt_long", f"parallel.context_parallel={how}", f"hydra.run.dir={run}")
    assert done.code == 0, done.err
    plan = json.loads((run / "plan.json").read_text(encoding="utf-8"))
    piece = 2 * 4 * 128 * 16 * 4
    sent = 2 * 2 * 3 * piece  # layers, keys and values, transfers
    if how == "gather":
        assert plan["communication"]["all_gather"] == 2 * sent
        assert plan["communication"]["reduce_scatter"] == sent
    else:
        assert plan["communication"]["rotate"] == 4 * sent
        assert plan["communication"]["mirror"] == 2 * (4 + 4 + 5) * piece // 2


@pytest.mark.slow
def test_blocks_travel_where_no_other_plan_keeps_the_limit(command, tmp_path):
    """8.1 MiB with gathered keys and values, 5.6 MiB around the ring; a saved plan says which."""
    limited = ("plan", "+recipe=gpt_long", "parallel.recompute=none", "parallel.plan_cache=null")
    for limit, ring in ((9, False), (7, True)):
        run = tmp_path / str(limit)
        done = command(*limited, f"parallel.memory_limit={limit}MB", f"hydra.run.dir={run}")
        assert done.code == 0, done.err
        plan = json.loads((run / "plan.json").read_text(encoding="utf-8"))
        assert ("rotate" in plan["communication"], plan["search"].get("context_parallel")) == (
            ring,
            "ring" * ring or None,
        )
    given = command(*limited, "parallel.memory_limit=7MB", "parallel.context_parallel=gather")
    assert given.code == 2 and "[MW501]" in given.err
    again = command(
        "plan", "+recipe=gpt_long", f"parallel.plan={tmp_path / '7'}", f"hydra.run.dir={tmp_path / 'again'}"
    )
    assert again.code == 0, again.err
    plan = json.loads((tmp_path / "again" / "plan.json").read_text(encoding="utf-8"))
    assert plan["communication"]["rotate"]


@pytest.mark.slow
def test_128k_tokens_fit_with_what_the_search_finds(command, tmp_path):
    """Without a configured strategy; 8 devices cannot share 25 heads."""
    run = tmp_path / "run"
    words = (
        "plan",
        "parallel=auto",
        "parallel.search=recursive_programming",
        "cluster=dgx_h100",
        "world_size=8",
        "model.target=models.gpt.GPT",
        "model.args={vocabulary: 50257, length: 131072, width: 1600, layers: 48, heads: 25}",
        "loss.target=models.losses.NextTokenLoss",
        "data.target=runner.data.text.Windows",
        "data.args={length: 131072, train: true}",
        "data.batch_size=1",
        "optimizer.target=torch.optim.AdamW",
        "train.precision=bf16",
        "parallel.zero.stage=1",
        "parallel.dataset_strategy=full_batch",
        "parallel.memory_limit=80GB",
        "parallel.plan_cache=null",
        f"hydra.run.dir={run}",
    )
    ended = command(*words)
    assert ended.code == 0, ended.err
    plan = json.loads((run / "plan.json").read_text(encoding="utf-8"))
    assert plan["search"]["context_parallel"] == "ring" and plan["memory"]["peak"] < 80e9
    attention = [one for one in plan["operators"] if one["op"] == "scaled_dot_product_attention"]
    assert len(attention) == 48 and {one["in_strategy"][1][2] for one in attention} == {8}
    gathered = command(*words, "parallel.context_parallel=gather", "run.overwrite=true")
    assert gathered.code == 2 and "[MW50" in gathered.err


@pytest.mark.slow
@pytest.mark.parametrize("how", ["gather", "ring"])
@pytest.mark.parametrize(
    "words",
    [
        ("parallel.zero.stage=3",),
        ("parallel.recompute.operators=selective",),
        ("parallel.recompute.operators=none",),
        (
            "parallel.pipeline.stages=2",
            "parallel.pipeline.micro_batches=2",
            "parallel.mesh={cp: 2}",
            "parallel.dataset_strategy=[[1, 2], [1, 2]]",
            f"parallel.strategies={{{ATTENTION}: [[1, 1, 2, 1], [1, 1, 2, 1], [1, 1, 2, 1]]}}",
        ),
        (
            "parallel.mesh={cp: 2, tp: 2}",
            "parallel.dataset_strategy=[[1, 2], [1, 2]]",
            f"parallel.strategies={{{ATTENTION}: [[1, 2, 2, 1], [1, 2, 2, 1], [1, 2, 2, 1]]}}",
        ),
    ],
    ids=["ZeRO-3", "selective recompute", "no recompute", "pipeline", "tensor parallel"],
)
def test_processes_agree(start, tmp_path, how, words):
    small = ("model.args.length=64", "data.args.length=64", "+data.args.limit=200000", f"+data.args.cache={tmp_path}")
    context = f"parallel.context_parallel={how}"
    ended = start("+recipe=gpt_long", *small, context, *words, "verify.steps=2", verb="verify")
    assert ended.verdict["passed"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["gather", "ring"])
def test_packed_documents_in_slices(start, tmp_path, how):
    """Their mask is sliced with the queries: no document sees another one, on any rank."""
    data = "{length: 64, tokenizer: null, separator: '\n\n\n', limit: 200000, train: true}"
    words = (
        *("+recipe=gpt_long", "world_size=2", "parallel.mesh={cp: 2}", f"parallel.context_parallel={how}"),
        *(f"parallel.strategies={{{ATTENTION}: {[[1, 1, 2, 1]] * 4}}}", "parallel.dataset_strategy=data_parallel"),
        *("data.target=runner.data.packing.Packed", f"data.args={data}", f"+data.args.cache={tmp_path}"),
        *("model.args.length=64", "model.args.vocabulary=257", "train.precision=fp64", "verify.steps=2"),
    )
    assert start(*words, verb="verify").value < 1e-10
