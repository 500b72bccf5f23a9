"""Weights & Biases: metrics, checkpoints and the finished model of a run, and the way back from an artifact.

`WandbCallback` of transformers logs metrics. Its artifacts do not fit: they have no configuration of the run and no
tokenizer, and the last one has the last weights, not the best. Ours contain files of the run directory under the same
names, so that a downloaded artifact is opened like a run.
"""

import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import Trainer, TrainerState, TrainingArguments
from transformers.integrations import WandbCallback
from transformers.integrations.integration_utils import WandbLogModel

from ..errors import UserError
from ..files import atomic_directory, read_json, write_text
from .checkpoint import PREFIX, checkpoints_in
from .config import CONFIG_NAME, DataConfig, RunConfig
from .run import WANDB_PREFIX, RunFolder
from .training_state import preserve_rng_state

DEFAULT_PROJECT = "linformer-kit"
INSTALL = 'pip install "linformer-kit[wandb]"'


@contextmanager
def report_to_wandb(trainer: Trainer, run: RunFolder, config: RunConfig, console: Console) -> Iterator[None]:
    """Report what the trainer does in the block, if `training.report` names wandb; then log the finished model."""
    if "wandb" not in config.training.reports:
        yield
        return
    report = WandbReport(run, console)
    trainer.add_callback(report)
    is_done = False
    try:
        yield
        is_done = True
    finally:
        report.close(is_done)


class WandbReport(WandbCallback):
    """Logs metrics, each checkpoint and the finished model; an error after the start ends the report, not the training.

    The id of the W&B run is stored in the run directory, so that a resumed run continues it.
    """

    def __init__(self, run: RunFolder, console: Console):
        super().__init__()
        self._log_model = WandbLogModel.FALSE
        self.run_folder, self.console = run, console
        self.is_lost = False
        self.sets_data_dir = "WANDB_DATA_DIR" not in os.environ

    def setup(self, args: TrainingArguments, state: TrainerState, model: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            if self.sets_data_dir:  # copies of files that are not yet uploaded; by default in the home directory
                os.environ["WANDB_DATA_DIR"] = str((self.run_folder.folder / "wandb").absolute())
            try:
                self._wandb.init(
                    project=os.environ.get("WANDB_PROJECT", DEFAULT_PROJECT),
                    name=os.environ.get("WANDB_NAME", self.run_folder.folder.resolve().name),
                    dir=os.environ.get("WANDB_DIR", str(self.run_folder.folder)),
                    id=self.run_id(),
                    resume="allow",
                )
            except self._wandb.Error as error:
                raise UserError(
                    f"training.report has wandb, which cannot start ({' '.join(str(error).split())}); log in with "
                    "`wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline"
                ) from error
        super().setup(args, state, model, **kwargs)

    def run_id(self) -> str:
        """The id of the W&B run, made when the run begins."""
        if found := os.environ.get("WANDB_RUN_ID"):
            return found
        path = self.run_folder.wandb_id
        if not path.is_file():
            path.parent.mkdir(exist_ok=True)
            write_text(path, secrets.token_hex(4))
        return path.read_text(encoding="utf-8").strip()

    @property
    def is_active(self) -> bool:
        return self._initialized and not self.is_lost and self._wandb.run is not None

    def attempt(self, action: Callable[[], object]) -> None:
        """Call `action`; if it fails, training continues without a report."""
        try:
            with preserve_rng_state():
                action()
        except Exception as error:  # the service of wandb has ended, a full disk, …
            self.is_lost = True
            self.console.print(
                f"Reporting to W&B failed ({type(error).__name__}: {' '.join(str(error).split())}). Training continues "
                "without it.",
                style="yellow",
                markup=False,
                soft_wrap=True,
            )

    def on_log(self, args, state, control, model=None, logs=None, **kwargs):
        if not self.is_lost:
            self.attempt(lambda: super(WandbReport, self).on_log(args, state, control, model, logs, **kwargs))

    def on_save(self, args, state, control, **kwargs):
        if self.is_active:
            folder, step = self.run_folder.checkpoints / f"{PREFIX}{state.global_step}", state.global_step
            self.attempt(lambda: self.log_artifact(folder, {"step": step}, [f"step-{step}", "latest"]))

    def log_artifact(self, folder: Path, metadata: dict[str, Any], aliases: list[str]) -> None:
        """Log a checkpoint or model together with the files of the run that `open_model` needs."""
        run = self.run_folder
        artifact = self._wandb.Artifact(self.artifact_name, type="model", metadata=metadata)
        shared = [run.config, run.data, run.environment, *run.tokenizer.iterdir()]
        own = [run.result] if folder == run.model else []
        for path in [*shared, *own, *folder.rglob("*")]:
            if path.is_file():
                # copied, because old checkpoints are removed, maybe before they are uploaded
                name = path.relative_to(run.folder).as_posix()
                artifact.add_file(str(path), name=name, skip_cache=True, policy="mutable")
        self._wandb.run.log_artifact(artifact, aliases=aliases)

    @property
    def artifact_name(self) -> str:
        """The name of the run directory and the id: other runs may have the same directory name."""
        name = re.sub(r"[^\w.-]+", "-", self.run_folder.folder.resolve().name, flags=re.ASCII)
        return f"{name[:100]}-{self._wandb.run.id}"

    def close(self, is_done: bool) -> None:
        """Log the model of a finished run and wait until everything is uploaded; Ctrl-C ends the upload only."""
        if self.is_active:
            run, name = self._wandb.run, self.artifact_name
            if is_done:
                result = read_json(self.run_folder.result)
                self.attempt(lambda: self.log_artifact(self.run_folder.model, result, ["final", "latest"]))
            if is_done and not self.is_lost and not run.disabled:
                owner = "ENTITY" if run.offline else run.entity
                line = f"W&B artifact: {WANDB_PREFIX}{owner}/{run.project}/{name}:final"
                self.console.print(line, highlight=False, markup=False, soft_wrap=True)
            self.attempt(lambda: self._wandb.finish(exit_code=0 if is_done else 1))
        if self.sets_data_dir:
            os.environ.pop("WANDB_DATA_DIR", None)


# downloading


def download(name: str) -> Path:
    """Download an artifact ENTITY/PROJECT/ARTIFACT:ALIAS; returns the finished run or the checkpoint in it."""
    source = f"{WANDB_PREFIX}{name}"
    parts = re.fullmatch(r"(\w[\w.-]*)/(\w[\w.-]*)/(\w[\w.-]*):\w[\w.-]*", name)
    if parts is None:
        raise UserError(
            f"{source} is not the name of an artifact; write {WANDB_PREFIX}ENTITY/PROJECT/ARTIFACT:ALIAS, with an "
            "alias such as final, latest, step-100 or v3"
        )
    try:
        import wandb
    except ModuleNotFoundError:
        raise UserError(f"{source} needs wandb, which is not installed; {INSTALL}") from None
    try:
        artifact = wandb.Api().artifact(name)
        # a version never changes; an alias moves
        folder = Path(DataConfig.cache, "wandb", *parts.groups(), artifact.version).expanduser()
        if not folder.is_dir():
            with atomic_directory(folder, keep_existing=True) as unfinished:
                artifact.download(root=str(unfinished))
    except Exception as error:  # no network, no login, no such artifact, a full disk
        raise UserError(
            f"{source} could not be downloaded ({' '.join(str(error).split()) or type(error).__name__}); check the "
            "name, and log in with `wandb login` or WANDB_API_KEY"
        ) from error
    if not (folder / CONFIG_NAME).is_file():
        raise UserError(f"{source} is not an artifact of `linformer train`: it has no {CONFIG_NAME}")
    run = RunFolder(folder)
    if run.is_finished or not (found := checkpoints_in(run.checkpoints)):
        return folder
    return found[-1]
