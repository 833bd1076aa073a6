"""Jobs for Kubernetes and SkyPilot: what they say by the schemas of both, and that their nodes train together."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from launched import RECIPE, ROOT, STEPS, losses
from test_commands import PLACE, given

from runner.errors import ConfigError
from runner.launch.launchers.commands import JOB_FILE, LaunchSite, kubernetes, skypilot

HERE = Path(__file__).parent
QUICK = "+recipe=quickstart"
NO_HOSTS = {"hosts": [], "options": []}


def schema(name: str, kind: str = "") -> jsonschema.Draft202012Validator:
    """The schema of a file, or of one kind of Kubernetes."""
    content = json.loads((HERE / f"{name}.schema.json").read_text(encoding="utf-8"))
    chosen = {**content, "$ref": f"#/$defs/V1{kind}"} if kind else content
    jsonschema.Draft202012Validator.check_schema(chosen)
    return jsonschema.Draft202012Validator(chosen)


def of_kubernetes(site: LaunchSite = PLACE, **values: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Service and Job."""
    launch = given(**{"launcher": "kubernetes", "image": "mine:1", **NO_HOSTS, **values})
    service, job = yaml.safe_load_all(kubernetes(launch, site).files[JOB_FILE])
    return service, job


@pytest.mark.parametrize("values", [{}, {"nodes": 2, "claim": "runs", "max_restarts": 3, "options": ["-n", "me"]}])
def test_a_job_of_kubernetes_is_what_its_schema_says(values: dict[str, Any]) -> None:
    service, job = of_kubernetes(**values)
    schema("kubernetes", "Service").validate(service)
    schema("kubernetes", "Job").validate(job)
    for change in ({"completionMod": "Indexed"}, {"backoffLimit": "3"}):
        wrong = copy.deepcopy(job)
        wrong["spec"] |= change
        assert not schema("kubernetes", "Job").is_valid(wrong)
    wrong = copy.deepcopy(job)
    wrong["spec"]["template"]["spec"]["containers"][0]["resource"] = {}
    assert not schema("kubernetes", "Job").is_valid(wrong)


def test_the_pods_of_a_job_find_one_another() -> None:
    """A pod is NAME-INDEX.SUBDOMAIN, if a headless service of that name selects it."""
    service, job = of_kubernetes(nodes=2, max_restarts=3, claim="mine")
    name, spec = job["metadata"]["name"], job["spec"]
    template = spec["template"]
    assert name == service["metadata"]["name"] == template["spec"]["subdomain"] == "a-join"
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    assert spec["backoffLimit"] == 6
    (container,) = template["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    *_, script = container["command"]
    assert "getent hosts a-join-0.a-join " in script
    assert (
        "'launch.hosts=[a-join-0.a-join:2,a-join-1.a-join:2]' launch.host=a-join-$JOB_COMPLETION_INDEX.a-join" in script
    )
    assert " +x=1 " in script and " hydra.run.dir=/runs/a-join " in script and " train.resume=auto" in script
    on_cpus = of_kubernetes(LaunchSite(**{**vars(PLACE), "device": "cpu"}))[1]
    assert on_cpus["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"] == {}


@pytest.mark.parametrize("folder", ["/runs/8 Übung__x/2026-11-23_10-00-00-ab", f"/{'x' * 90}/{'y' * 90}"])
def test_a_job_has_a_name_that_dns_knows(folder: str) -> None:
    name = of_kubernetes(LaunchSite(**{**vars(PLACE), "folder": Path(folder)}))[1]["metadata"]["name"]
    label = f"{name}-1023"
    assert len(label) < 64 and label.replace("-", "").isalnum() and label.islower() and label[0].isalpha()


@pytest.mark.parametrize("values", [{}, {"nodes": 2, "accelerator": "H100", "max_restarts": 1}, {"image": "mine:1"}])
def test_a_task_of_skypilot_is_what_its_schema_says(values: dict[str, Any]) -> None:
    started = skypilot(given(**{"launcher": "skypilot", **NO_HOSTS, **values}), PLACE)
    task = yaml.safe_load(started.files[JOB_FILE])
    schema("skypilot").validate(task)
    assert not schema("skypilot").is_valid({**task, "nodes": 2})
    assert not schema("skypilot").is_valid({**task, "resources": {"accelerator": "H100"}})
    assert task["num_nodes"] == values.get("nodes", 1)
    assert task["resources"].get("accelerators") == ("H100:2" if "accelerator" in values else None)
    assert ("setup" in task) == ("image" not in values)
    (command,) = started.commands
    assert command.words == ("sky", "launch", "-c", "a-join", "/runs/a/join/job.yaml")


def test_nodes_have_equally_many_ranks() -> None:
    with pytest.raises(ConfigError) as refused:
        of_kubernetes(nodes=3)
    assert refused.value.code == "MW704"


@pytest.mark.parametrize(
    "words",
    [
        ["launch=kubernetes"],
        ["launch=skypilot", "launch.claim=a"],
    ],
)
def test_what_a_job_cannot_have_is_refused(command, words: list[str]) -> None:
    refused = command("launch", QUICK, *words)
    assert refused.code == 2 and "[MW205]" in refused.err


def _program(folder: Path, name: str, body: str) -> dict[str, str]:
    """The environment in which `name` is a script."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_a_job_is_submitted_once_it_is_wanted(command, left, tmp_path: Path) -> None:
    words = ("launch", QUICK, "launch=kubernetes", "launch.image=mine:1", "launch.nodes=2", "hydra.run.dir=runs/a")
    dry = command(*words, "--dry-run")
    assert dry.code == 0 and left() == []
    environment = _program(tmp_path / "bin", "kubectl", 'echo "$@"; test "$1" = apply')
    done = command(*words, **environment)
    assert (done.code, done.err) == (0, "")
    text = (tmp_path / "runs" / "a" / JOB_FILE).read_text(encoding="utf-8")
    assert text.rstrip() in dry.out
    assert f"kubectl apply -f {tmp_path}/runs/a/{JOB_FILE}\n" in done.out
    refused = command(*words, "run.overwrite=true", **_program(tmp_path / "bin", "kubectl", "exit 3"))
    assert refused.code == 1 and "kubectl ended with exit code 3" in refused.err and "[MW863]" in refused.err


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["kubernetes", "skypilot"])
def test_the_nodes_of_a_job_train_together(tmp_path: Path, launcher: str) -> None:
    """The script of every node, at once, on addresses of this machine."""
    site = LaunchSite(**{**vars(PLACE), "overrides": (*RECIPE, f"launch={launcher}", f"train.steps={STEPS}")})
    described = (kubernetes if launcher == "kubernetes" else skypilot)(
        given(**{"launcher": launcher, "image": "mine:1", "nodes": 2, "port": 29613, **NO_HOSTS}), site
    )
    *_, document = yaml.safe_load_all(described.files[JOB_FILE])
    if launcher == "kubernetes":
        script = document["spec"]["template"]["spec"]["containers"][0]["command"][2]
        for name in ("0", "1", "$JOB_COMPLETION_INDEX"):
            number = "$((JOB_COMPLETION_INDEX + 1))" if name.startswith("$") else str(int(name) + 1)
            script = script.replace(f"a-join-{name}.a-join", f"127.0.0.{number}")
    else:
        script = document["run"]
    own = _program(tmp_path / "bin", "meshwright", f'exec {sys.executable} -m meshwright "$@"')
    nodes = []
    for number in (0, 1):
        (tmp_path / str(number)).mkdir()
        environment = {
            **os.environ,
            **own,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "JOB_COMPLETION_INDEX": str(number),
            "SKYPILOT_NODE_RANK": str(number),
            "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2",
        }
        nodes.append(
            subprocess.Popen(
                ["sh", "-c", script], cwd=tmp_path / str(number), env=environment,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8",
            )
        )  # fmt: skip
    printed = [node.communicate(timeout=200)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(printed)
    assert len(losses(tmp_path / "0" / "run")) == STEPS
