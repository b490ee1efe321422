"""The sparse kernel on aarch64: cross-compiled, run under qemu, compared with this machine's baseline bit by bit.

    apt-get install gcc-aarch64-linux-gnu qemu-user
    python benchmarks/other_processors.py

Both builds round after every multiplication (no fused multiply-add), so that all bits have to agree; a third one, as it
would be installed, is compared with double precision. Ends with exit code 1 if anything differs.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = [str(ROOT / "src/platon/deploy/sparse.c"), str(ROOT / "benchmarks/fuzz_sparse.c")]
FLAGS = ["-O2", "-std=gnu11", "-fno-math-errno", "-static"]
CROSS, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
CASES = "1500"


def outcome(compiler: str, emulator: list[str], folder: Path, *flags: str) -> dict[str, int]:
    """What the program counts when it is built by this compiler."""
    program = folder / f"{compiler}{len(flags)}"
    subprocess.run([compiler, *FLAGS, *flags, *SOURCES, "-o", str(program), "-lm"], check=True)
    done = subprocess.run([*emulator, str(program), CASES, "1", "0"], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{compiler}: {done.stdout}{done.stderr}")
    found: dict[str, int] = json.loads(done.stdout)
    return found


def main() -> None:
    emulator = shutil.which(EMULATOR) or shutil.which(f"{EMULATOR}-static")
    if emulator is None or shutil.which(CROSS) is None:
        print(f"skipped: {CROSS} or {EMULATOR} is not installed; apt-get install gcc-aarch64-linux-gnu qemu-user")
        return
    alike = ("-ffp-contract=off", "-DBASELINE_MOST=16")
    with tempfile.TemporaryDirectory() as folder:
        here = outcome("cc", [], Path(folder), *alike)
        there = outcome(CROSS, [emulator], Path(folder), *alike)
        installed = outcome(CROSS, [emulator], Path(folder))
    print(json.dumps({"here": here, "aarch64": there, "aarch64_as_installed": installed}))
    if here != there or {**installed, "digest": 0} != {**here, "digest": 0}:
        sys.exit("the kernel computes something else on aarch64")


if __name__ == "__main__":
    main()
