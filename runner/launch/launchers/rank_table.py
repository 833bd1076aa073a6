"""A table of ranks: one process per host, which imports torch once and forks the ranks of its host."""

from __future__ import annotations

from runner.config.launch import Launch
from runner.launch.launchers.commands import Command, LaunchSite, Started


def rank_table(launch: Launch, place: LaunchSite) -> Started:
    """One command per host."""
    return Started(
        tuple(
            Command((place.python, *place.join, "--host", host.name), host.name, place.environment)
            for host in launch.hosts
        )
    )
