"""Which cores a rank takes, on machines described by files as Linux and NVIDIA's driver write them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipeline.cluster import host

UUID = "{:08x}-0000-0000-0000-00000000000a"


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Two sockets of 4 cores with two threads each (0-3 and 8-11, 4-7 and 12-15), and four GPUs: 0, 1 beside the second socket."""
    for number in range(4):
        address = f"0000:{16 * (number + 1):02X}:00.0"
        information = tmp_path / "proc" / address.lower() / "information"
        information.parent.mkdir(parents=True)
        information.write_text(f"Model: \t\t H100\nGPU UUID: \t GPU-{UUID.format(number)}\nBus Location: \t {address}\n")
        device = tmp_path / "sys/bus/pci/devices" / address.lower()
        device.mkdir(parents=True)
        (device / "local_cpulist").write_text("4-7,12-15\n" if number < 2 else "0-3,8-11\n")
    for cpu in range(16):
        topology = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu % 8},{cpu % 8 + 8}\n")
    return tmp_path


def shares(machine: Path, allowed: set[int], ranks: int = 4) -> list[set[int]]:
    places = host.gpu_places(machine / "proc")
    near = [host.near(places[UUID.format(number)], machine / "sys") & allowed for number in range(ranks)]
    return [host.share_of(rank, near, machine / "sys") for rank in range(ranks)]


def test_each_rank_gets_whole_cores_beside_its_gpu(machine: Path) -> None:
    """Guards against ranks on the other socket, two ranks on one core, and cores that nobody has."""
    assert shares(machine, set(range(16))) == [{4, 5, 12, 13}, {6, 7, 14, 15}, {0, 1, 8, 9}, {2, 3, 10, 11}]
    assert shares(machine, set(range(16)), ranks=3)[2] == {0, 1, 2, 3, 8, 9, 10, 11}
    assert shares(machine, {0, 1, 2, 3, 5, 6, 7}) == [{5}, {6, 7}, {0, 1}, {2, 3}]  # others than the job has are not taken
    assert shares(machine, {0, 1, 2, 3}) == [set(), set(), {0, 1}, {2, 3}], "without a core nearby: left where they are"


def test_unknown_places_bind_nothing(tmp_path: Path) -> None:
    """Guards against a rank that fails, or stays on one core, in a container that hides /sys."""
    assert host.gpu_places(tmp_path) == {} and host.near(None, tmp_path) == set()
    assert host.share_of(0, [set(), set()], tmp_path) == set()


@pytest.mark.parametrize(
    ("per_task", "visible", "local_size", "expected"),
    [("16", 4, 4, None), ("", 4, 1, None), ("", 1, 4, None), ("", 4, 4, {0, 1, 8, 9}), ("4", 4, 4, {0, 1, 8, 9})],
)
def test_when_a_rank_binds_itself(
    per_task: str,
    visible: int,
    local_size: int,
    expected: set[int] | None,
    machine: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards against a share of a share that Slurm has given, and a lone process that loses half of its machine."""
    taken: list[set[int]] = []
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: taken[-1] if taken else set(range(16)))
    monkeypatch.setattr("os.sched_setaffinity", lambda pid, cpus: taken.append(cpus))
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", per_task)

    class Properties:
        def __init__(self, index: int) -> None:
            self.uuid = UUID.format(index)

    monkeypatch.setattr(torch.cuda, "get_device_properties", Properties)
    now = host.bind_near_gpu(2, visible, local_size, machine / "proc", machine / "sys")
    assert (taken, now) == (([], list(range(16))) if expected is None else ([expected], sorted(expected)))
