"""What people install: wheel and sdist are built, installed into an empty environment, and used there.

    python benchmarks/release.py [FOLDER]

1. `python -m build` makes both; the wheel has the compiled kernel, `py.typed` and the metadata.
2. In an empty environment without a C compiler, with torch and the wheel alone, the engine prunes.
3. Each extra by itself resolves (`pip install --dry-run`).
4. With the extra `lab`, `platon prune` prunes the digits there, and `platon.load` opens the folder that it deployed.
5. The sdist installs in the same environment, still without a compiler: no kernel then; the same model gives the same
   outputs through torch.sparse, with a warning, and `platon prune` works.
6. With a compiler, the sdist builds the kernel.

Needs pip to reach an index (or a mirror), and minutes. Ends with exit code 1 at the first thing that fails. FOLDER is
kept; without it everything happens in a temporary folder.
"""

import argparse
import email
import os
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENGINE = """
import sys, warnings
warnings.simplefilter("ignore")  # torch's, that there is no NumPy
import torch, platon
model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)
optimizer = torch.optim.AdamW(model.parameters())
pruner = platon.Pruner(model, optimizer, schedule=platon.Cubic(final=0.25, total=20))
for _ in range(20):
    model(torch.randn(2, 5, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"kept {pruner.kept():.4f} of {pruner.units.count} weights")
assert not {"numpy", "transformers", "safetensors", "rich"} & set(sys.modules)
"""
LOAD = """
import sys, warnings
import torch, platon
from platon.deploy import sparse_kernel
warnings.simplefilter("ignore")
found = sparse_kernel.find()
dense, fast = platon.load(sys.argv[1] + "/model"), platon.load(sys.argv[1] + "/fast")
pixels = torch.randn(4, *[getattr(dense.config, name) for name in ("num_channels", "image_size", "image_size")])
with torch.no_grad():
    difference = (dense(pixels).logits - fast(pixels).logits).abs().max()
sparse = sum(type(module).__name__ in ("SparseLinear", "CsrLinear") for module in fast.modules())
print(f"kernel {'none: ' + found if isinstance(found, str) else 'compiled'};", end=" ")
print(f"{sparse} layers skip zeros; largest difference {difference:.1e}")
assert difference < 1e-4
assert isinstance(found, str) == (sys.argv[2] == "none")
"""


def run(*words: object, **environment: str) -> str:
    """A command's standard output; the program ends where it fails."""
    done = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, env={**os.environ, **environment}
    )
    if done.returncode:
        sys.exit(f"failed: {' '.join(map(str, words))[:300]}\n{done.stdout[-2000:]}{done.stderr[-3000:]}")
    return done.stdout


def say(start: float, text: str) -> None:
    print(f"{time.monotonic() - start:6.0f} s  {text}", flush=True)


def check_wheel(wheel: Path) -> str:
    """The version in the metadata; the wheel has what it should have."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = email.message_from_bytes(archive.read(next(name for name in names if name.endswith("/METADATA"))))
    assert any(name.startswith("platon/deploy/_sparse") and name.endswith(".so") for name in names), "no kernel"
    assert {"platon/py.typed", "platon/deploy/sparse.c"} <= set(names), "files are missing"
    assert not [name for name in names if name.startswith(("tests", "docs", "website", "benchmarks"))]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("Project-URL")
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    return str(metadata["Version"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    given = parser.parse_args()
    if given.folder is None:
        with tempfile.TemporaryDirectory() as folder:
            check(Path(folder))
    else:
        given.folder.mkdir(parents=True, exist_ok=True)
        check(given.folder.resolve())


def check(folder: Path) -> None:
    start = time.monotonic()
    run(sys.executable, "-m", "build", "--outdir", folder / "dist", ROOT)
    (wheel,), (sdist,) = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
    version = check_wheel(wheel)
    say(start, f"{wheel.name} {wheel.stat().st_size:,} bytes, {sdist.name} {sdist.stat().st_size:,} bytes")

    run(sys.executable, "-m", "venv", folder / "venv")
    programs = folder / "venv" / "bin"
    alone = {"PATH": str(programs), "CC": "/bin/false", "CXX": "/bin/false", "PYTHONPATH": "", "HF_HUB_OFFLINE": "1"}
    alone |= {"OMP_NUM_THREADS": "1"}  # the models are tiny
    alone |= {"XDG_CACHE_HOME": str(folder / "cache")}  # the user's own may hold a kernel that was compiled earlier
    pip = (programs / "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt")
    run(*pip, "torch", **alone)  # first and by itself, so that no other package decides which build is taken
    run(*pip, wheel, **alone)
    say(start, f"torch and the wheel alone: {run(programs / 'python', '-c', ENGINE, **alone).strip()}")

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in extras:
        run(*pip, "--dry-run", f"{wheel}[{extra}]", **alone)
    say(start, f"each extra by itself resolves: {', '.join(extras)}")

    run(*pip, f"{wheel}[lab]", **alone)
    assert run(programs / "platon", "--version", **alone).strip() == f"platon {version}"
    prune = (programs / "platon", "prune", "--steps", "20", "--dense", "none", "--train-rows", "256")
    run(*prune, "--output", folder / "run", **alone)
    load = (programs / "python", "-c", LOAD, folder / "run")
    say(start, f"wheel, platon prune on the digits, platon.load: {run(*load, 'compiled', **alone).strip()}")

    again = (*pip, "--force-reinstall", "--no-deps", "--no-cache-dir", sdist)
    run(*again, **alone)
    run(*prune, "--output", folder / "run-without-kernel", **alone)
    say(start, f"sdist without a compiler, the same folder: {run(*load, 'none', **alone).strip()}")

    run(*again)
    say(start, f"sdist with a compiler, the same folder: {run(*load, 'compiled', **alone).strip()}")


if __name__ == "__main__":
    main()
