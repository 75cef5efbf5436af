"""Make the fixtures of the parity suite again, from the authors' code and the timm that each pins; README.md beside has the commands.

Every repository is imported in a process of its own: all of them have a module called ``models`` or ``model``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
URLS = {
    "pervit": "https://github.com/juhongm999/pervit",
    "convit": "https://github.com/facebookresearch/convit",
    "deit": "https://github.com/facebookresearch/deit",
    "lsat": "https://github.com/shellysheynin/Locally-SAG-Transformer",
    "posmlp": "https://github.com/Zhicaiwww/PosMLP",
}
TIMM = {"pervit": "0.3.2", "convit": "0.3.2", "deit": "0.3.2", "lsat": "0.4.12", "posmlp": "0.4.12"}


def record(family: str, checkout: Path, timm: Path, output: Path) -> None:
    """Write a family's fixtures; runs in its own process."""
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    from recording import checkouts

    checkouts.prepare(checkout, timm)
    import numpy as np
    import torch
    from recording import draws, initial_weights, models, recipes

    torch.manual_seed(0)
    made = {
        "made_by": f"python tests/parity/make_fixtures.py --only {family}",
        "from": URLS[family],
        "versions": checkouts.versions(checkout, TIMM[family]),
    }
    schedules = {name: recipes.schedule(checkout, recipe) for name, recipe in recipes.RECIPES[family].items()}
    groups = {name: models.groups(family, name, checkout) for name in models.PUBLISHED[family]}
    evaluation = draws.sizes(family, checkout)
    drawn = draws.all_draws(family) if family in draws.CROP_RATIOS else {}
    fixture = made | {"schedules": schedules, "groups": groups, "evaluation": evaluation} | drawn
    (output / f"{family}.json").write_text(_readable(fixture) + "\n")
    for name in models.SMALL[family]:
        np.savez_compressed(output / f"{name}_initial.npz", made=json.dumps(made), **initial_weights.summaries(name))
        arrays = models.trajectory(family, name, checkout)
        np.savez_compressed(output / f"{name}.npz", made=json.dumps(made), **arrays)


def _readable(value: object, depth: int = 0) -> str:
    """JSON, a line for whatever fits into one."""
    line = json.dumps(value)
    if not isinstance(value, dict) or len(line) + 2 * depth < 100:
        return line
    indent = "  " * (depth + 1)
    items = [f"{indent}{json.dumps(str(key))}: {_readable(each, depth + 1)}" for key, each in value.items()]
    return "{\n" + ",\n".join(items) + "\n" + "  " * depth + "}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for family, url in URLS.items():
        parser.add_argument(f"--{family}", type=Path, metavar="FOLDER", help=f"checkout of {url}")
    parser.add_argument("--timm-0.3.2", type=Path, metavar="FOLDER", help="pip install --no-deps --target FOLDER timm==0.3.2")
    parser.add_argument("--timm-0.4.12", type=Path, metavar="FOLDER", help="pip install --no-deps --target FOLDER timm==0.4.12")
    parser.add_argument("--only", choices=URLS, action="append", help="a family; repeat for more; default: all")
    parser.add_argument("--output", type=Path, default=HERE / "fixtures", help="default: %(default)s")
    parser.add_argument("--record", choices=URLS, help=argparse.SUPPRESS)
    options = vars(parser.parse_args())
    for family in [options["record"]] if options["record"] else options["only"] or URLS:
        checkout, timm = options[family], options[f"timm_{TIMM[family]}"]
        if not checkout or not timm:
            parser.error(f"{family} needs --{family} and --timm-{TIMM[family]}")
        if options["record"]:
            record(family, checkout.resolve(), timm.resolve(), options["output"])
            continue
        print(family, flush=True)
        options["output"].mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--record", family], check=True)


if __name__ == "__main__":
    main()
