"""Run a model that ``pervit export --format onnx`` wrote, in ONNX Runtime: on the GPU if it is built for one, else on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor, nn

from pipeline.errors import UserError, first_line, missing_extra
from pipeline.models.weights.exported import parse_description

INPUT, OUTPUT = "images", "scores"
DESCRIPTION = "description"  # in the file's metadata
_PROVIDERS = ("CUDAExecutionProvider", "CPUExecutionProvider")


class OnnxModel(nn.Module):
    """The graph of a file, (B, 3, S, S) -> (B, classes) float32 on the images' device. Raises UserError: ONNX Runtime is
    missing, the file is damaged, or does not describe its model.
    """

    def __init__(self, path: Path, providers: tuple[str, ...] = _PROVIDERS) -> None:
        super().__init__()
        try:
            import onnxruntime
        except ImportError as error:
            raise missing_extra(str(path), "ONNX Runtime", "onnx", error=error) from None
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors
        options.intra_op_num_threads = torch.get_num_threads()
        usable = [each for each in providers if each in onnxruntime.get_available_providers()]
        try:
            self._session = onnxruntime.InferenceSession(str(path), options, providers=usable)
        except Exception as error:  # its own types, without a common one
            raise UserError(f"{path} cannot be read as ONNX ({first_line(error)})", "export it again") from None
        metadata = self._session.get_modelmeta().custom_metadata_map
        if DESCRIPTION not in metadata:
            raise UserError(f"{path} does not describe its model and classes", "pass a file of `pervit export --format onnx`")
        self.description = parse_description(path, metadata[DESCRIPTION])
        self.exported_precision: str = metadata["precision"]

    def forward(self, images: Tensor) -> Tensor:
        scores = self._session.run([OUTPUT], {INPUT: images.float().cpu().numpy()})[0]
        return torch.from_numpy(scores).to(images.device)

    @property
    def pooled(self) -> NoReturn:
        raise UserError("an ONNX file gives scores, not features", "pass the run, or its safetensors file")

    pooled_width = pooled
