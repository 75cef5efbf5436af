"""A Slurm whose nodes have networks of their own: the controller on n0, where one submits, and a slurmd on each other node."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from faults.nodes import Node, Nodes
from support.launching import REPOSITORY
from support.slurm_cluster import Cluster, Submitted


class SlurmOfNodes(Cluster):
    """What ``launch/local_cluster.sh`` configures, its daemons on nodes that can be cut off."""

    def __init__(self, port: int, nodes: Nodes) -> None:
        super().__init__(port)
        self.lab = nodes
        self.environment["PATH"] += ":/usr/sbin:/sbin"

    def up(self, nodes: int = 0) -> None:
        """Write the configuration, with the keys, and start the daemons. ``nodes``: all but the first of the lab's."""
        super().up(len(self.lab.nodes) - 1)
        assert self.script("down").returncode == 0
        port = int(self.environment["PERVIT_CLUSTER_PORT"])
        conf, (first, *others) = self.folder / "etc" / "slurm.conf", self.lab.nodes
        text = re.sub(r"^NodeName=(?!DEFAULT).*\n", "", conf.read_text(), flags=re.MULTILINE)
        text = re.sub(r"^SlurmctldHost=.*", f"SlurmctldHost={first.name}({first.address})", text, flags=re.MULTILINE)
        lines = [f"NodeName={node.name} NodeAddr={node.address} Port={port + 100 + node.number}\n" for node in others]
        conf.write_text(text.replace("PartitionName", "".join(lines) + "PartitionName"))
        self.lab.name_all(self.folder / "etc" / "hosts")
        munge = {name: self.folder / place for name, place in (("key-file", "etc/munge.key"), ("socket", "run/munge.sock"))}
        munge |= {"pid-file": self.folder / "run/munged.pid", "log-file": self.folder / "log/munged.log"}
        munge |= {"seed-file": self.folder / "run/munge.seed"}
        subprocess.run(["munged", *(f"--{name}={path}" for name, path in munge.items())], check=True, env=self.environment)
        for node in self.lab.nodes:
            words = ["slurmd", "-N", node.name] if node.number else ["slurmctld"]
            subprocess.run(
                [*node.inside, *words, "-f", str(conf)],
                check=True,
                env=self.environment,
                preexec_fn=lambda node=node: _join(node),
            )
        while self.run("sinfo", "--noheader", "--states=idle", "--format=%D").strip() != str(len(others)):
            time.sleep(0.05)

    def run(self, *command: object, cwd: Path = REPOSITORY, may_fail: bool = False, **variables: str) -> str:
        return super().run(*self.lab.nodes[0].inside, "env", "-C", cwd, *command, cwd=cwd, may_fail=may_fail, **variables)

    def stop(self, job: Submitted, rank: int) -> list[int]:
        """Stop the processes of one rank, once there are any; returns them."""
        while not (found := job.task(rank)):
            time.sleep(0.05)
        self.send(signal.SIGSTOP, found)
        return found

    def send(self, number: signal.Signals, pids: list[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _join(node: Node) -> None:
    for group in node.cgroups:
        (group / "cgroup.procs").write_text("0")


@contextmanager
def slurm_of_nodes(port: int, nodes: Nodes) -> Iterator[SlurmOfNodes]:
    started = SlurmOfNodes(port, nodes)
    try:
        started.up()
        yield started
    finally:
        started.down()
