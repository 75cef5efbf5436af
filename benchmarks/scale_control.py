"""The control plane at scale: start, heartbeat, agreement, publication of a checkpoint, loss of a rank.

    python -m benchmarks.scale_control [--ranks 16 64] [--signs 64 256 1024 4096] [--seconds 10] [--silence 5]

--ranks: that many real processes on this machine train a toy model, and one is killed. --signs: a real rank 0 with its store and
heartbeat, and the requests of that many others from a few processes, of whom one falls silent. Everything is on 127.0.0.1, and
ends by itself after minutes. It needs about 150 MB of memory for each of --ranks and two open files for each of --signs.
"""

from __future__ import annotations

import argparse
import os
import resource
import secrets

from pipeline.command_line import run_command
from pipeline.errors import UserError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[16, 64], metavar="N", help="real processes (default: 16 64)")
    parser.add_argument(
        "--signs", type=int, nargs="*", default=[64, 256, 1024, 4096], metavar="N", help="simulated ranks (default: 64 to 4096)"
    )
    parser.add_argument("--seconds", type=float, default=10, help="that the load of --signs is measured (default: 10)")
    parser.add_argument("--silence", type=float, default=5, help="distributed.silence_timeout (default: 5)")
    args = parser.parse_args()
    _check(args.ranks, 2, 256, "--ranks")
    _check(args.signs, 8, 16384, "--signs")
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        del os.environ[name]
    # The name server is none of what is measured, but PyTorch asks it for every address and waits 5 seconds for a lost answer.
    os.environ.update(OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR", RES_OPTIONS="timeout:1 attempts:1")
    if args.ranks:
        print_ranks(args.ranks, args.silence)
    if args.signs:
        print_signs(args.signs, args.seconds, args.silence)


def _check(numbers: list[int], low: int, high: int, option: str) -> None:
    for number in numbers:
        if not low <= number <= high:
            raise UserError(f"{option} is {number}, {low} to {high} needed", "choose such numbers")
    files, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[1], 2 * max(numbers, default=0) + 256
    if option == "--signs" and files != resource.RLIM_INFINITY and files < needed:
        raise UserError(f"a process may open {files} files (ulimit -Hn), {needed} needed", "choose fewer --signs")


def print_ranks(sizes: list[int], silence: float) -> None:
    """Tables of real processes."""
    from benchmarks.scale_control_ranks import measure

    found = [measure(size, silence) for size in sizes]
    print(
        f"| real processes | {' | '.join(found[0].start)} | files open in rank 0, in others | the store's keys, bytes sent |"
        f"\n|---|{'---|' * len(found[0].start)}---|---|"
    )
    for each in found:
        print(
            f"| {each.size} | {' | '.join(f'{s:.1f} s' for s in each.start.values())} | {each.files[0]}, {each.files[1]} | {each.keys}, {each.sent / 1e6:.2f} MB |"
        )
    print(
        "\n| real processes | exchange of status: seconds, CPU per process | as one group | stall of a save | until it is published"
        " | files, manifest | killed to all ended |\n|---|---|---|---|---|---|---|"
    )
    for each in found:
        print(
            f"| {each.size} | {1e3 * each.exchange:.0f} ms, {1e3 * each.exchange_cpu:.2f} ms | {1e3 * each.flat_exchange:.0f} ms, "
            f"{1e3 * each.flat_exchange_cpu:.2f} ms | {each.stall:.2f} s | {each.published:.2f} s | {each.checkpoint_files}, "
            f"{each.manifest / 1024:.0f} KiB | {each.named:.1f} s, {each.sentences} sentence{'s' if each.sentences > 1 else ''} |"
        )
    print(f"\n{found[-1].sentence}\n")


def print_signs(sizes: list[int], seconds: float, silence: float) -> None:
    """The table of simulated ranks."""
    from benchmarks.scale_control_ranks import free_port
    from benchmarks.scale_control_signs import simulate

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(
        "| signs of life | requests/s | to, from the store | store's thread | rank 0's heartbeat thread, per beat | files open in rank 0"
        f" | lost rank named after {silence:g} s and | read by all after | a rank's sign every |\n|---|---|---|---|---|---|---|---|---|"
    )
    for size in sizes:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), PERVIT_JOB_SECRET=secrets.token_hex(32))
        each = simulate(size, seconds, silence)
        print(
            f"| {size:,} | {each.requests:,.0f} | {each.received / 1e6:.2f}, {each.sent / 1e6:.2f} MB/s | {100 * each.serving:.1f} % of a core | "
            f"{1e3 * each.reading / each.rank_0_beats:.1f} ms | {each.files:,} | {each.named:.1f} s | {each.informed:.1f} s | {each.beat:.2f} s |",
            flush=True,
        )
    print(f"\nerror: {each.sentence}")


if __name__ == "__main__":
    run_command(main)
