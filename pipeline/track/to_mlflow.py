"""Send to MLflow: each value is a point of a metric with its step and its time, as MLflow keeps them.

The calls wait for the store, and a tag has the number of items that are there. What was under way when a process died is compared with
what the store has. ``MLFLOW_TRACKING_URI`` (a server, ``sqlite:///FILE``, a folder), ``MLFLOW_TRACKING_TOKEN`` and so on are the
client's, as always.
"""

import os
import re
from collections.abc import Sequence
from typing import Any

from pipeline.errors import UserError, first_line
from pipeline.track.tracker import About, Item, Picture, Point, Segment, flat

_SEGMENT, _ITEMS, _STATE, _SUPERSEDED = "pervit.segment", "pervit.items", "pervit.state", "pervit.superseded_by"
_METRICS, _PARAMETERS = 1000, 100  # in a call: MLflow's limits
_LONGEST_VALUE = 500  # letters of a parameter: the least that its stores allow


class MLflow:
    """MLflow, where a project is an experiment; its variable is ``MLFLOW_EXPERIMENT_NAME``."""

    def __init__(self, project: str | None) -> None:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # the loop tries again by itself
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        import mlflow

        self._mlflow, self._run_id = mlflow, ""
        self._experiment = project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "pervit"
        self.target = f"MLflow ({mlflow.get_tracking_uri()}, {self._experiment})"
        self._client: Any = None
        self._unsure = False  # whether the store may have some of the next points

    def open(self, segment: Segment, about: About, sent: int) -> int:
        from mlflow.exceptions import MlflowException

        try:
            self._client = self._mlflow.MlflowClient()
            run = self._run_of(segment, about)
        except MlflowException as error:
            if error.error_code in ("INVALID_PARAMETER_VALUE", "UNAUTHENTICATED", "PERMISSION_DENIED"):
                remedy = "correct MLFLOW_TRACKING_URI, or the credentials that MLflow's documentation names"
                raise UserError(f"{self.target} refuses ({first_line(error)[:200]})", remedy) from None
            raise
        self._run_id = segment.place = run.info.run_id
        if run.info.status != "RUNNING":
            self._client.update_run(self._run_id, status="RUNNING")
        for earlier in segment.earlier:
            self._client.set_tag(earlier, _SUPERSEDED, self._run_id)
            if self._client.get_run(earlier).info.status == "RUNNING":  # nobody sent when the run was rewound
                self._client.set_terminated(earlier, "KILLED")
        self.describe(about)
        self._unsure = sent > 0
        return min(int(run.data.tags.get(_ITEMS, 0)), sent)

    def send(self, first: int, items: Sequence[Item]) -> None:
        from mlflow.entities import Metric, RunTag

        metrics = [
            Metric(_word(name), value, round(1000 * item.time), item.step)
            for item in items if isinstance(item, Point)
            for name, value in item.values.items() if not isinstance(value, str)
        ]  # fmt: skip
        # A sender that died may have sent pictures that this one finds later than its first rows.
        pictures = self._missing_pictures([item for item in items if isinstance(item, Picture)])
        if self._unsure:
            metrics = self._missing_metrics(metrics)
        for begin in range(0, len(metrics), _METRICS - 1):
            self._client.log_batch(self._run_id, metrics=metrics[begin : begin + _METRICS - 1])
        for item in pictures:
            when = int(1000 * item.time)
            self._client.log_image(self._run_id, item.image(), key=item.name, step=item.step, timestamp=when, synchronous=True)
        self._client.log_batch(self._run_id, tags=[RunTag(_ITEMS, str(first + len(items)))])
        self._unsure = False

    def describe(self, about: About) -> None:
        from mlflow.entities import Param

        values = {key: str(value)[:_LONGEST_VALUE] for key, value in flat(about.config).items()}
        there = self._client.get_run(self._run_id).data.params  # a parameter is set once and for all
        new = [Param(key, value) for key, value in values.items() if key not in there]
        for begin in range(0, len(new), _PARAMETERS):
            self._client.log_batch(self._run_id, params=new[begin : begin + _PARAMETERS])
        changed = {key: value for key, value in values.items() if there.get(key, value) != value}
        for key, value in {**changed, **{f"start.{key}": str(value) for key, value in flat(about.start).items()}}.items():
            self._client.set_tag(self._run_id, _word(key), value[:_LONGEST_VALUE] or "none")
        for name, text in about.texts.items():
            self._client.log_text(self._run_id, text, name)

    def close(self, state: str) -> None:
        client, self._client = self._client, None
        if state == "lost":
            return
        client.set_tag(self._run_id, _STATE, state)
        if state != "stopped":  # then the run goes on, and so does its history
            client.set_terminated(self._run_id, "FINISHED" if state == "complete" else "KILLED")

    def _run_of(self, segment: Segment, about: About) -> Any:
        """The run of a segment, made where there is none."""
        if segment.place:
            return self._client.get_run(segment.place)
        experiment = self._client.get_experiment_by_name(self._experiment)
        number = experiment.experiment_id if experiment else self._client.create_experiment(self._experiment)
        if runs := self._client.search_runs([number], f"tags.`{_SEGMENT}` = '{segment.id}'"):
            return runs[0]
        tags = {_SEGMENT: segment.id, "pervit.rewinds": str(segment.number - 1)}
        return self._client.create_run(number, run_name=segment.title(about.name), tags=tags)

    def _missing_metrics(self, metrics: list[Any]) -> list[Any]:
        there = {
            (key, point.timestamp, point.step, point.value)
            for key in sorted({metric.key for metric in metrics})
            for point in self._client.get_metric_history(self._run_id, key)
        }
        return [metric for metric in metrics if (metric.key, metric.timestamp, metric.step, metric.value) not in there]

    def _missing_pictures(self, pictures: list[Picture]) -> list[Picture]:
        artifacts = self._client.list_artifacts(self._run_id, "images") if pictures else []
        # As MLflow names the file of an image: NAME%step%STEP%timestamp%..., with # for / in the name; later with + and ~.
        named = (re.match(r"(.+)[%+]step[%+](\d+)[%+]timestamp", os.path.basename(artifact.path)) for artifact in artifacts)
        there = {(re.sub("[#~]", "/", found[1]), int(found[2])) for found in named if found}
        return [item for item in pictures if (item.name, item.step) not in there]


def _word(name: str) -> str:
    """A name of letters that MLflow allows."""
    return re.sub(r"[^\w./ :-]", "_", name)
