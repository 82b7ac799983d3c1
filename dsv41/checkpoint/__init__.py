"""Checkpoints in the public safetensors layout, read and written by slices, and random weights in their place."""

from dsv41.checkpoint.layout import PARTS, TensorSpec, checkpoint_layout
from dsv41.checkpoint.load import SLICE_BYTES, LoadProgress, load_checkpoint
from dsv41.checkpoint.placement import ParameterTree, abstract_parameters, parameter_path
from dsv41.checkpoint.random import RandomSource
from dsv41.checkpoint.random_device import random_parameters
from dsv41.checkpoint.safetensors_io import CheckpointError, CheckpointReader, TensorSource
from dsv41.checkpoint.save import config_json, copy_checkpoint, save_checkpoint

__all__ = [
    "PARTS",
    "SLICE_BYTES",
    "CheckpointError",
    "CheckpointReader",
    "LoadProgress",
    "ParameterTree",
    "RandomSource",
    "TensorSource",
    "TensorSpec",
    "abstract_parameters",
    "checkpoint_layout",
    "config_json",
    "copy_checkpoint",
    "load_checkpoint",
    "parameter_path",
    "random_parameters",
    "save_checkpoint",
]
