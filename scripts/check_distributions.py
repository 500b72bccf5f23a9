"""Build the sdist and the wheel, check their metadata, install and run each in a new environment: `make build`.

The environment has no dependencies but the small ones: `linformer --version` and `--help` must not need torch.
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
PROGRAMS = "Scripts" if os.name == "nt" else "bin"  # of a virtual environment
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


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    # PYTHONPATH may name the sources; the constraints apply to build environments too
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PIP_CONSTRAINT"] = str(ROOT / "constraints.txt")
    done = subprocess.run(command, cwd=cwd, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}{' '.join(map(str, command))} failed with code {done.returncode}")
    return done.stdout


def light_requirements(wheel: Path) -> list[str]:
    """The dependencies of a wheel, extras and large ones left out."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        fields = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist", [])
    requirements = [Requirement(field) for field in fields]
    return [
        str(requirement) for requirement in requirements if requirement.marker is None and requirement.name not in LARGE
    ]


def check_installed(distribution: Path, environment: Path, version: str) -> None:
    """Install a distribution in place of the previous one and run it, away from the sources."""
    programs = environment / PROGRAMS
    run(*pip_install(programs), "--no-deps", "--force-reinstall", distribution, cwd=environment)
    printed = run(programs / "linformer", "--version", cwd=environment).strip()
    if version not in printed:
        sys.exit(f"linformer --version of {distribution.name} prints {printed!r}, not {version}")
    run(programs / "linformer", "train", "--help", cwd=environment)
    run(programs / "python", "-c", CHECK_DATA, cwd=environment)
    print(f"{distribution.name}: installed; linformer --version prints {printed}")


def pip_install(programs: Path) -> tuple[str | Path, ...]:
    return programs / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"


def main() -> None:
    output = ROOT / "dist"
    shutil.rmtree(output, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", output)
    (wheel,), (sdist,) = output.glob("*.whl"), output.glob("*.tar.gz")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    with tempfile.TemporaryDirectory() as directory:
        environment = Path(directory)
        venv.create(environment, with_pip=True)
        run(*pip_install(environment / PROGRAMS), *light_requirements(wheel))
        for distribution in (wheel, sdist):
            check_installed(distribution, environment, version=wheel.name.split("-")[1])


if __name__ == "__main__":
    main()
