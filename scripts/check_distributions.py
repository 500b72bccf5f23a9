"""Build the sdist and the wheel, check their metadata, and run each in an environment of its own: `make build`.

Each environment gets the distribution and its dependencies except the large ones, which `linformer --version` and
`linformer --help` must not need.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
LARGE = {"torch", "transformers", "numpy"}
# files that are no modules, but must be in the package
CHECK_DATA = """
from importlib.resources import files
package = files("linformer_kit")
configs = [path.name for path in package.joinpath("configs").iterdir() if path.name.endswith(".yaml")]
assert len(configs) > 5, configs
for name in ("py.typed", "report/page.html"):
    assert package.joinpath(name).is_file(), name
"""


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # which may name the sources
    done = subprocess.run(command, cwd=cwd, env=outside | environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}failed with code {done.returncode}")
    return done.stdout


def light_requirements(wheel: Path) -> list[str]:
    """The dependencies of a wheel, extras and large ones left out."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        fields = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist", [])
    requirements = [Requirement(field) for field in fields]
    return [str(needed) for needed in requirements if needed.marker is None and needed.name not in LARGE]


def check_installed(distribution: Path, requirements: list[str], version: str) -> None:
    """Install a distribution in a new environment and run it, away from the sources."""
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        venv.create(home / "venv", with_pip=True)
        programs = home / "venv" / ("Scripts" if os.name == "nt" else "bin")
        install = (programs / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        constraints = str(ROOT / "constraints.txt")
        run(*install, "--no-deps", distribution, cwd=home, PIP_CONSTRAINT=constraints)
        run(*install, *requirements, cwd=home, PIP_CONSTRAINT=constraints)
        printed = run(programs / "linformer", "--version", cwd=home).strip()
        if version not in printed:
            sys.exit(f"linformer --version of {distribution.name} prints {printed!r}, not {version}")
        run(programs / "linformer", "train", "--help", cwd=home)
        run(programs / "python", "-c", CHECK_DATA, cwd=home)
        print(f"{distribution.name}: installed, linformer --version prints {printed}")


def main() -> None:
    output = ROOT / "dist"
    shutil.rmtree(output, ignore_errors=True)
    constraints = str(ROOT / "constraints.txt")
    run(sys.executable, "-m", "build", "--outdir", output, PIP_CONSTRAINT=constraints)
    (wheel,), (sdist,) = output.glob("*.whl"), output.glob("*.tar.gz")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    for distribution in (wheel, sdist):
        check_installed(distribution, light_requirements(wheel), version=wheel.name.split("-")[1])


if __name__ == "__main__":
    main()
