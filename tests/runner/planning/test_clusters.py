"""The section `cluster`: shipped descriptions, files, errors, and the default description for cost estimates."""

from pathlib import Path

import hydra
import pytest

from runner.cli import recipes
from runner.config import load as config
from runner.config.origins import Origins
from runner.errors import ConfigError
from runner.planning import clusters
from runner.planning.clusters import device_of
from runner.planning.prepare import check_described
from strategies.core.graph import OperatorGraph

MINIMAL = ("model.target=a.B", "data.target=a.C", "train.steps=1", "parallel=data_parallel")
CONF = Path(config.__file__).parents[2] / "conf" / "cluster"
SHIPPED = sorted(file.stem for file in CONF.glob("*.yaml"))

OWN = """
name: mine
nodes: 3
file: null
machine:
  levels:
    node: {size: "${cluster.nodes}", bandwidth: 1.0e9, latency: 1.0e-4, call: 0.0, kinds: {}}
    core:
      {size: 4, bandwidth: 8.0e9, latency: 1.0e-5, call: 0.0, kinds: {send: {bandwidth: 2.0e9, latency: 0, call: 0}}}
  flops: {float32: 1.0e10}
  memory: 1.0e9
  memory_bandwidth: 4.0e9
  achieved: {flops: 0.5, memory: 0.25, links: 0.1}
  launch: 0.0
  view: 0.0
  overlap: 0.5
  algorithms: [ring]
"""


def compose(*overrides):
    recipes.register()
    with hydra.initialize_config_module("conf", version_base="1.3"):
        return config.load(hydra.compose("config", [*MINIMAL, *overrides]), Origins(overrides))


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_clusters_are_complete(name):
    found = compose(f"cluster={name}").cluster
    assert found.name == name
    assert (found.machine is None) == (name == "auto")


@pytest.mark.parametrize(("name", "near"), [("rms_norm", ""), ("tanh", ""), ("rms_nrom", "'rms_norm'")])
def test_operators_are_described_by_names_that_exist(name, near):
    pace = "{call: 0.0, factor: 2.0}"
    described = f"{{{name}: {{forward: {pace}, backward: {pace}}}}}"
    found = compose("cluster=laptop_gloo", f"+cluster.machine.operators={described}")
    if not near:
        check_described(found, OperatorGraph((), (), (), ()))
        return
    with pytest.raises(ConfigError, match=near) as refused:
        check_described(found, OperatorGraph((), (), (), ()))
    assert refused.value.code == "MW204"


def test_nodes_scale_a_cluster():
    described = clusters.cluster_of(compose("cluster=dgx_h100", "cluster.nodes=64"), "cpu", 512)
    assert [(level.name, level.size) for level in described.levels] == [("node", 64), ("gpu", 8)]
    assert described.flops["bfloat16"] == pytest.approx(989e12 * 0.70)
    assert described.fraction == 0.70
    assert described.levels[1].link.bandwidth == pytest.approx(450e9 * 0.82)


@pytest.mark.parametrize(
    ("device", "ranks", "name", "devices"),
    [
        ("cpu", 4, "laptop_gloo", 8),
        ("cpu", 32, "laptop_gloo", 32),
        ("cuda", 3, "dgx_h100", 8),
        ("cuda", 20, "dgx_h100", 24),
    ],
)
def test_without_a_choice_the_device_decides(device, ranks, name, devices):
    found = clusters.cluster_of(compose(), device, ranks)
    assert (found.name, found.devices) == (name, devices)


@pytest.mark.few(3)
@pytest.mark.parametrize(("ranks", "speed"), [(1, 4), (2, 4), (4, 2), (8, 1), (16, 0.5)])
def test_ranks_share_the_cores_of_a_machine(ranks, speed):
    """laptop_gloo is described with 8 busy ranks on 2 cores."""
    described = clusters.shipped("laptop_gloo")
    for chosen in ([], ["cluster=laptop_gloo"]):
        found, (level,) = clusters.cluster_of(compose(*chosen), "cpu", ranks), described.levels.values()
        assert found.peak("float32") == pytest.approx(speed * described.flops["float32"])
        assert found.memory_bandwidth == pytest.approx(speed * described.memory_bandwidth)
        assert (found.launch, found.view) == pytest.approx((described.launch / speed, described.view / speed))
        for kind in ("all_reduce", "all_gather"):
            link, of = found.levels[0].of(kind), level.kinds.get(kind, level)
            given = (speed * of.bandwidth, of.latency / speed, of.call / speed)
            assert (link.bandwidth, link.latency, link.call) == pytest.approx(given)


def test_a_file_describes_a_machine(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(OWN, encoding="utf-8")
    found = clusters.cluster_of(compose(f"cluster.file={file}"), "cpu", 8)
    assert (found.name, found.devices, found.overlap) == ("mine", 12, 0.5)
    assert found.peak("float32") == 5e9
    assert found.memory_bandwidth == 1e9
    assert found.levels[1].of("send").bandwidth == pytest.approx(2e8)
    assert found.levels[1].of("all_gather").bandwidth == pytest.approx(8e8)
    assert clusters.cluster_of(compose(f"cluster.file={file}", "cluster.nodes=5"), "cpu", 8).devices == 20
    assert clusters.from_description(file) == found


def test_a_described_cluster_says_how_many_ranks_are_planned():
    assert device_of(compose("cluster=dgx_h100", "cluster.nodes=2", "job=plan")) == ("cpu", 16)
    assert device_of(compose("cluster=dgx_h100", "cluster.nodes=2", "job=plan", "world_size=4")) == ("cpu", 4)
    assert device_of(compose("cluster=dgx_h100", "device=cpu")) == ("cpu", 8)  # a run uses the ranks of this machine


REFUSED = [
    (["cluster=one_gpu", "cluster.nodes=2"], "cluster.nodes = 2 has no effect: cluster = 'one_gpu' has no level"),
    (["cluster.nodes=2"], "cluster.nodes = 2 has no effect: cluster = 'auto'"),
    (["cluster=a100", "cluster.machine.levels.node.size=3"], "nodes = 1, but cluster.machine.levels.node.size = 3"),
    (["cluster=dgx_h100", "world_size=9"], "world_size = 9 needs 9 devices, but cluster = 'dgx_h100' has 8"),
    (["cluster=one_gpu", "world_size=4"], "'one_gpu' has 1; choose a larger cluster or fewer ranks (world_size=1)."),
    (["cluster=dgx_h100", "world_size=9"], "choose a larger cluster (cluster.nodes) or fewer ranks (world_size=8)."),
    (
        ["cluster=dgx_h100", "cluster.nodes=2", "job=plan", "parallel=semi_auto", "parallel.mesh={a: 8}"],
        "parallel.mesh = [8] has 8 devices, but world_size = null takes all 16 of cluster = 'dgx_h100'; set "
        "world_size=8, or parallel.mesh for all of them. (from the command line: parallel.mesh",
    ),
    (["cluster=dgx_h100", "cluster.file=x.yaml"], "both describe the machine; drop one of them"),
    (["cluster.file=nowhere.yaml"], "cluster.file = 'nowhere.yaml' cannot be read"),
    (["cluster=a100", "cluster.machine.achieved.flops=1.5"], "cluster.machine.achieved.flops = 1.5: must be at most 1"),
    (["cluster=a100", "~cluster.machine.flops.float32"], "lacks float32"),
]


@pytest.mark.few(5)
@pytest.mark.parametrize(("overrides", "said"), REFUSED)
def test_refusals_name_the_keys(overrides, said):
    with pytest.raises(ConfigError) as refused:
        compose(*overrides)
    assert said in str(refused.value)


@pytest.mark.parametrize("nodes", ["0", "-3", "1.5"])
def test_duplicate_settings_are_reported_once(nodes):
    with pytest.raises(ConfigError) as refused:
        compose("cluster=dgx_h100", f"cluster.nodes={nodes}")
    (said,) = refused.value.paragraphs
    assert said.startswith(f"cluster.nodes = {nodes}: must be ")


@pytest.mark.parametrize("text", ["- a\n- b\n", "name: x\n", "a: [1\n", "machine: ${nowhere}\n"])
def test_a_file_that_describes_nothing_is_refused(text, tmp_path):
    file = tmp_path / "bad.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="is not a description of a cluster"):
        compose(f"cluster.file={file}")
