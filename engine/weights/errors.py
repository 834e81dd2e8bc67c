# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with a model on disk. Torch-free: the API process raises these too.

EngineError > ModelError(ValueError)            code
  ModelNotFoundError              model_not_found
  ModelFormatError                model_format: a file is damaged or of a kind we cannot read
  UnsupportedModelError           model_unsupported: readable, but a feature of it is not built
  WeightMismatchError             weight_mismatch: a tensor is missing or has another shape
"""

from __future__ import annotations

from engine.errors import EngineError


class ModelError(EngineError, ValueError):
    """Root of the tree; `code` is stable."""

    code = "model_error"


class ModelNotFoundError(ModelError):
    """There is no model where the configuration says."""

    code = "model_not_found"


class ModelFormatError(ModelError):
    """A model file cannot be parsed."""

    code = "model_format"


class UnsupportedModelError(ModelError):
    """The model asks for something this engine does not have."""

    code = "model_unsupported"


class WeightMismatchError(ModelError):
    """A tensor is missing, or its shape is not what the configuration asks for."""

    code = "weight_mismatch"
