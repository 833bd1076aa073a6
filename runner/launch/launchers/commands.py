"""The commands of every launcher: pure functions from the section `launch` and a launch site to commands and files.

`run launch --dry-run` prints what such a function returns, `run train` starts it. Every launcher finally starts `python
-m runner.join FOLDER`, which reads its rank from the launcher's environment. No launcher's library is imported here.
"""

from __future__ import annotations

import fnmatch
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from runner.config.launch import Launch
from runner.launch.messages import silence_of
from runner.packages import ROOT

JOIN = "runner.join"
HOSTFILE = "hostfile"
DRY_RUN = "launch.dry_run"


@dataclass(frozen=True)
class LaunchSite:
    """Where a run is started from.

    Attributes:
        folder: the only argument of a rank; holds all of its inputs.
        world_size: how many ranks.
        address: where the others reach rank 0's host; loopback where there are none.
        port: free there, for launchers that need one.
        python: the interpreter.
        directory: the working directory, of all ranks too.
        environment: variables of this environment for ranks on other hosts.
        overrides: the words of the command, for scripts that repeat it.
    """

    folder: Path
    world_size: int
    address: str
    port: int
    python: str
    directory: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()

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
    """

    described: Callable[[Launch, LaunchSite], Started]
    variables: tuple[str, str, str, str] | None = None
    program: tuple[str, str] | None = None
    remote: bool = False


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
}


def exported(globs: Sequence[str], environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables whose names match one of `globs`."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in globs)
    }
