"""The commands of every launcher: pure functions from the section `launch` and a launch site to commands and files.

`run launch --dry-run` prints what such a function returns, `run train` starts it. Launchers that reach the hosts start
`python -m runner.join FOLDER`, which reads its rank from the launcher's environment. Those that submit a job describe
it in a file; on every node of it a command prepares and starts that node's part of a rank table. No launcher's library
is imported here.
"""

from __future__ import annotations

import fnmatch
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from runner.config.launch import Launch
from runner.errors import ConfigError
from runner.launch.messages import silence_of
from runner.packages import ROOT

JOIN = "runner.join"
HOSTFILE = "hostfile"
DRY_RUN = "launch.dry_run"


@dataclass(frozen=True)
class LaunchSite:
    """The place from which a run is started.

    Attributes:
        folder: the only argument of a rank; holds all of its inputs.
        world_size: how many ranks.
        address: where the others reach rank 0's host; loopback where there are none.
        port: free there, for launchers that need one.
        python: the interpreter.
        directory: the working directory, of all ranks too.
        environment: variables of this environment for ranks on other hosts.
        overrides: the words of the command, for scripts that repeat it.
        device: the key `device`: of jobs on other machines all but those on "cpu" ask for a GPU per rank.
    """

    folder: Path
    world_size: int
    address: str
    port: int
    python: str
    directory: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    device: str = "auto"

    def module(self, name: str, option: str = "-m") -> tuple[str, ...]:
        """The arguments after the interpreter that start one of our modules: by its name, or by its file where a
        folder of the user's is called `runner` too, which python would look into first."""
        if any((self.directory / taken).exists() for taken in ("runner", "runner.py")):
            file = ROOT.joinpath(*name.split("."))
            return (str(file / "__main__.py" if file.is_dir() else file.with_suffix(".py")),)
        return (option, name)

    @property
    def join(self) -> tuple[str, ...]:
        """The arguments after the interpreter that start a rank."""
        return (*self.module(JOIN), str(self.folder))


@dataclass(frozen=True)
class Command:
    """One command. `host` is where it has to run, None here; `environment` extends the existing environment."""

    words: tuple[str, ...]
    host: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    def shell(self, directory: Path) -> str:
        """The command for a shell of another host."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([f"cd {shlex.quote(str(directory))} && exec env", *variables, shlex.join(self.words)])


@dataclass(frozen=True)
class Started:
    """All that a launcher needs: `files` are written first, by name in the folder of the site; `script` is for a
    scheduler, and printed only."""

    commands: tuple[Command, ...]
    files: Mapping[str, str] = field(default_factory=dict)
    script: str | None = None


@dataclass(frozen=True)
class LauncherSpec:
    """A launcher.

    Attributes:
        described: its commands and files.
        variables: the names of the environment variables with rank, world size, local rank and local world size.
        program: the program that it is, or uses, and where that comes from.
        remote: whether the commands for other hosts, or the hosts themselves, are reached through `launch.remote`.
        submits: whether its command hands over a job, which this command does not wait for.
    """

    described: Callable[[Launch, LaunchSite], Started]
    variables: tuple[str, str, str, str] | None = None
    program: tuple[str, str] | None = None
    remote: bool = False
    submits: bool = False


def torchrun(launch: Launch, site: LaunchSite) -> Started:
    """An agent per host, or one for this machine, which starts the ranks of that host and watches them.

    With `launch.rendezvous=static` every agent is given its number; with c10d they find one another at the first host.
    """
    hosts: list[tuple[str | None, int]] = [(host.name, len(host.ranks)) for host in launch.hosts]
    hosts = hosts or [(None, site.world_size)]
    commands = []
    for number, (name, ranks) in enumerate(hosts):
        words = [site.python, "-m", "torch.distributed.run", f"--nnodes={len(hosts)}", f"--nproc-per-node={ranks}"]
        if launch.rendezvous == "static":
            words += [f"--node-rank={number}", f"--master-addr={site.address}", f"--master-port={site.port}"]
        else:
            words += [
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint={site.address}:{site.port}",
                f"--rdzv-id={site.folder.name}",
                f"--rdzv-conf=is_host={int(number == 0)},join_timeout={max(1, round(launch.timeout))}",
            ]
        words += [f"--local-addr={name or site.address}", "--max-restarts=0", *launch.options]
        commands.append(Command((*words, *site.join), name, site.environment if name else {}))
    return Started(tuple(commands))


def mpirun(launch: Launch, site: LaunchSite) -> Started:
    """OpenMPI's mpirun: one command, which reaches the hosts by itself and starts a process per rank, host by host.

    MPI is not used: ranks only read their numbers from the environment. Its daemons are set to notice that a host is
    down before the ranks do: one that still has to report the end of its ranks would wait for minutes.
    """
    words = ["mpirun", "-np", str(site.world_size)]
    if launch.hosts:
        words += ["--host", ",".join(f"{host.name}:{len(host.ranks)}" for host in launch.hosts)]
        probe = max(1, int(silence_of(launch.timeout) / 6))
        settings = {
            "plm_rsh_agent": shlex.join(launch.remote),
            "oob_tcp_keepalive_time": str(probe),
            "oob_tcp_keepalive_intvl": str(probe),
            "oob_tcp_keepalive_probes": "3",
        }
        words += [word for name, value in settings.items() for word in ("--mca", name, value)]
        words += ["--wdir", str(site.directory)]
        words += [word for name in site.environment for word in ("-x", name)]
    else:
        words += ["--host", f"localhost:{site.world_size}"]
    words += ["--map-by", "slot", "--bind-to", "none"]
    if os.geteuid() == 0:
        words.append("--allow-run-as-root")
    return Started((Command((*words, *launch.options, site.python, *site.join)),))


def slurm(launch: Launch, site: LaunchSite) -> Started:
    """`srun` starts a process per rank, in a job or from a login node; a script for `sbatch` repeats the command.

    In a job this command runs once, on its first node: it prepares, and its srun starts the ranks as a step of the job.
    """
    nodes = len(launch.hosts) or launch.nodes or 1
    resources = [f"--nodes={nodes}", f"--ntasks={site.world_size}", f"--ntasks-per-node={site.world_size // nodes}"]
    if launch.hosts:
        resources.append(f"--nodelist={','.join(host.name for host in launch.hosts)}")
    step = ["srun", *resources, "--kill-on-bad-exit=1", "--distribution=block", "--export=ALL"]
    step += [f"--chdir={site.directory}", *launch.options, site.python, *site.join]
    repeated = [word for word in site.overrides if not word.startswith(DRY_RUN)]
    script = [
        "#!/bin/bash",
        *(f"#SBATCH {word}" for word in ("--job-name=meshwright", *resources)),
        f"cd {shlex.quote(str(site.directory))}",
        "unset SLURM_PROCID  # of the script itself, which is no rank",
        shlex.join(["exec", site.python, *site.module("runner"), "train", *repeated]),
        "",
    ]
    return Started((Command(tuple(step)),), script="\n".join(script))


def deepspeed(launch: Launch, site: LaunchSite) -> Started:
    """DeepSpeed's launcher: it reads a hostfile, reaches the hosts by pdsh and ssh, and starts a process per rank. An
    option keeps it from adding its own arguments to the program."""
    words = [site.python, "-m", "deepspeed.launcher.runner", f"--hostfile={site.folder / HOSTFILE}"]
    words += [f"--master_addr={site.address}", f"--master_port={site.port}"]
    words += ["--force_multi"] if len(launch.hosts) > 1 else ["--no_ssh_check"]
    words += ["--no_local_rank", *launch.options, *site.module(JOIN, "--module"), str(site.folder)]
    content = "".join(f"{host.name} slots={len(host.ranks)}\n" for host in launch.hosts)
    return Started((Command(tuple(words)),), {HOSTFILE: content})


def rank_table(launch: Launch, site: LaunchSite) -> Started:
    """One process per host, which imports torch once and forks the ranks of its host."""
    words = (site.python, *site.join, "--host")
    return Started(tuple(Command((*words, host.name), host.name, site.environment) for host in launch.hosts))


JOB_FILE = "job.yaml"
MEETING_PORT = 29500
KEPT = ("launch.timeout=", "launch.threads=", "launch.check_memory=")
"""Words about launching that hold for the commands of a submitted job too."""
CLAIMED = "/runs"
"""Where pods see the volume of `launch.claim`."""


def kubernetes(launch: Launch, site: LaunchSite) -> Started:
    """An Indexed Job with a pod per node, and a headless Service by which the pods find one another's names.

    Names of pods resolve once they run, so each waits for that of the first. A pod that is restarted continues the
    newest checkpoint in the volume of `launch.claim`.
    """
    name, nodes, ranks = _name(site.folder), launch.nodes or 1, _ranks_per_node(launch, site)
    host = f"{name}-%s.{name}"
    hosts = ",".join(f"{host % node}:{ranks}" for node in range(nodes))
    words = _of_node(launch, site, name, folder=CLAIMED if launch.claim else "runs")
    script = (
        f"for _ in $(seq 300); do getent hosts {host % 0} >/dev/null && break; sleep 1; done\n"
        f"exec {words} 'launch.hosts=[{hosts}]' launch.host={host % '$JOB_COMPLETION_INDEX'}\n"
    )
    amounts = {"cpu": str(ranks * launch.threads)}
    limits = {} if site.device == "cpu" else {"nvidia.com/gpu": str(ranks)}
    volumes: list[dict[str, Any]] = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
    mounts = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    if launch.claim is not None:
        volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": launch.claim}})
        mounts.append({"name": "runs", "mountPath": CLAIMED})
    container = {
        "name": "ranks",
        "image": launch.image,
        "command": ["sh", "-c", script],
        "ports": [{"containerPort": MEETING_PORT}],
        "resources": {"requests": {**amounts, **limits}, "limits": limits},
        "volumeMounts": mounts,
    }
    labels = {"app.kubernetes.io/name": "meshwright", "app.kubernetes.io/instance": name}
    pod = {"subdomain": name, "restartPolicy": "Never", "containers": [container], "volumes": volumes}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": labels},
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels},
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "completionMode": "Indexed",
            "completions": nodes,
            "parallelism": nodes,
            "backoffLimit": nodes * launch.max_restarts,  # one rank that fails ends all pods
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
    command = Command(("kubectl", "apply", *launch.options, "-f", str(site.folder / JOB_FILE)))
    return Started((command,), {JOB_FILE: _yaml(service, job)})


def skypilot(launch: Launch, site: LaunchSite) -> Started:
    """A task of SkyPilot, which rents the nodes and copies the working directory to them. Every node reads the
    addresses of all from its environment."""
    name, nodes, ranks = _name(site.folder), launch.nodes or 1, _ranks_per_node(launch, site)
    resources: dict[str, Any] = {"cpus": f"{ranks * launch.threads}+"}
    if site.device != "cpu" and launch.accelerator is not None:
        resources["accelerators"] = f"{launch.accelerator}:{ranks}"
    if launch.image is not None:
        resources["image_id"] = f"docker:{launch.image}"
    script = (
        f'hosts=$(echo "$SKYPILOT_NODE_IPS" | sed "s/$/:{ranks}/" | paste -s -d , -)\n'
        'host=$(echo "$SKYPILOT_NODE_IPS" | sed -n "$((SKYPILOT_NODE_RANK + 1))p")\n'
        f'exec {_of_node(launch, site, name, folder="runs")} "launch.hosts=[$hosts]" "launch.host=$host"\n'
    )
    task = {"name": name, "num_nodes": nodes, "workdir": ".", "resources": resources}
    task |= {} if launch.image is not None else {"setup": "pip install meshwright\n"}
    command = Command(("sky", "launch", "-c", name, *launch.options, str(site.folder / JOB_FILE)))
    return Started((command,), {JOB_FILE: _yaml(task | {"run": script})})


def _of_node(launch: Launch, site: LaunchSite, name: str, folder: str) -> str:
    """The command that every node of a job repeats, without its hosts."""
    dropped = ("launch=", "launch.", "--")
    words = [word for word in site.overrides if word.startswith(KEPT) or not word.startswith(dropped)]
    of_the_job = {
        "image": launch.image,
        "claim": launch.claim,
        "accelerator": launch.accelerator,
        "nodes": launch.nodes,
    }
    words += [f"launch.{key}=null" for key, value in of_the_job.items() if value is not None]  # a recipe may set them
    words += ["launch=rank_table", f"launch.port={launch.port or MEETING_PORT}"]
    if not any(word.startswith("hydra.run.dir=") for word in words):
        words.append(f"hydra.run.dir={folder}/{name}")
    if launch.max_restarts:
        words.append("launch.max_restarts=0")  # the job starts its nodes again
        words += [] if any(word.startswith("train.resume=") for word in words) else ["train.resume=auto"]
    return shlex.join(["meshwright", "train", *words])


def _ranks_per_node(launch: Launch, site: LaunchSite) -> int:
    """Raises ConfigError where the nodes have not equally many."""
    nodes = launch.nodes or 1
    if site.world_size % nodes:
        raise ConfigError(
            "MW704",
            f"launch = {launch.launcher!r} starts equally many ranks on every node, but world_size = "
            f"{site.world_size} is not a multiple of launch.nodes = {nodes}.",
        )
    return site.world_size // nodes


def _name(folder: Path) -> str:
    """A name for a job, from its run folder: a label of DNS (RFC 1035), with room for the number of a pod."""
    text = re.sub(r"[^a-z0-9]+", "-", "-".join(folder.parts[-2:]).lower()).strip("-")[:52].strip("-")
    return text if text[:1].isalpha() else f"run-{text}"


def _yaml(*documents: Mapping[str, Any]) -> str:
    text: str = yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=1000)
    return text


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # yaml has no types here
    """Writes scripts as blocks, and repeats what occurs twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)

LAUNCHERS = {
    "torchrun": LauncherSpec(torchrun, ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), remote=True),
    "mpirun": LauncherSpec(
        mpirun,
        (
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
        ("mpirun", "apt-get install openmpi-bin, or your site's module"),
        remote=True,
    ),
    "slurm": LauncherSpec(
        slurm,
        ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
        ("srun", "it belongs to Slurm; start on a machine of the cluster"),
    ),
    "deepspeed": LauncherSpec(
        deepspeed,
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE"),
        ("pdsh", "apt-get install pdsh, or launch.options=[--launcher,openmpi]"),
    ),
    "rank_table": LauncherSpec(rank_table, remote=True),
    "kubernetes": LauncherSpec(
        kubernetes, program=("kubectl", "it belongs to Kubernetes; --dry-run prints the YAML without it"), submits=True
    ),
    "skypilot": LauncherSpec(skypilot, program=("sky", "pip install skypilot"), submits=True),
}


def exported(globs: Sequence[str], environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables whose names match one of `globs`."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in globs)
    }
