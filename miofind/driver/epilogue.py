"""The flags of an epilogue, which driver lines and shapes share, and MIOpen's fusion modes and activations.

Either --epilogue with the whole text, or a flag for each part. Sources: ROCm/MIOpen, driver/CBAInferFusion_driver.hpp
(fusionMode_t), include/miopen/miopen.h (miopenActivationMode_t).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from miofind.core.epilogue import Activation, ResidualPosition
from miofind.core.problem import DataType, Direction, Epilogue, enum_value
from miofind.errors import InvalidProblemError

SWITCHES = ("scale", "bias", "channel-bias")
"""Flags that need no value."""

PARTS = (*SWITCHES, "residual", "activation", "parameter-dtype")
FLAG_NAMES = ("epilogue", *PARTS)

_MODES = {
    0: "scale.bias",  # convolution, bias, batch norm, activation
    1: "scale.bias",  # convolution, batch norm, activation
    3: "scale.bias",  # convolution, batch norm
    4: "bias",  # convolution, bias, activation
    5: "",  # convolution, activation
    6: "bias",  # convolution, bias
}
_WITHOUT_ACTIVATION = (3, 6)
_ACTIVATIONS = {
    0: Activation.NONE,
    1: Activation.SIGMOID,
    2: Activation.TANH,
    3: Activation.RELU,
    7: Activation.CLAMP,  # clipped relu
    8: Activation.LEAKY_RELU,
    9: Activation.ELU,
    10: Activation.CLAMP,
}
_REFUSED = {4: "softrelu", 5: "abs", 6: "power"}


def epilogue_of(given: Mapping[str, str]) -> Epilogue:
    """The epilogue that flags name, by flag without dashes; a switch is there or not.

    Raises:
        InvalidProblemError: both forms are given, or the message names the flag and the value.
    """
    parts = [name for name in PARTS if name in given]
    text = given.get("epilogue")
    if text is not None:
        if parts:
            raise InvalidProblemError(f"--epilogue {text} and --{parts[0]} are two forms of one thing: give one")
        return Epilogue.of(text)
    position = enum_value(ResidualPosition, given.get("residual", ResidualPosition.NONE), "--residual")
    dtype = given.get("parameter-dtype")
    epilogue = Epilogue(
        scale="scale" in given,
        bias="bias" in given,
        channel_bias="channel-bias" in given,
        residual=position,
        activation=enum_value(Activation, given.get("activation", Activation.NONE), "--activation"),
        parameter_dtype=None if dtype is None else enum_value(DataType, dtype, "--parameter-dtype"),
    )
    if dtype is not None and epilogue.parameter_dtype is None:
        raise InvalidProblemError(f"--parameter-dtype {dtype} is the type of --scale and --bias: add one of them")
    return epilogue


def check_directions(epilogue: Epilogue, directions: Sequence[Direction], told: str) -> None:
    """Do nothing where all directions take an epilogue.

    Args:
        told: the flag and value that asked for the directions.

    Raises:
        InvalidProblemError: one does not.
    """
    wrong = [direction.value for direction in directions if direction not in epilogue.directions]
    if wrong:
        known = " and ".join(epilogue.directions)
        raise InvalidProblemError(
            f"{told} asks for {' and '.join(wrong)}, and epilogue {epilogue.text} is of {known} problems alone: "
            f"ask for {known}, or leave the epilogue out"
        )


def fusion_epilogue(mode: int, activation: int, batch_norm: int) -> Epilogue:
    """What a CBAInfer line does to a convolution; a batch norm is the scale and bias that it folds into.

    Args:
        mode: of -F; activation: of -m; batch_norm: of -M, 0 for a scale of each element, 1 for one of each channel.

    Raises:
        InvalidProblemError: there is no convolution, or an epilogue has not that activation or batch norm.
    """
    if mode not in _MODES:
        what = "is a batch norm and an activation without a convolution" if mode == 2 else "must be between 0 and 6"
        raise InvalidProblemError(f"--fusion_mode (-F) {mode} {what}: 4 is convolution, bias and activation")
    if "scale" in _MODES[mode] and batch_norm != 1:
        raise InvalidProblemError(
            f"--bnMode (-M) {batch_norm} with --fusion_mode (-F) {mode}: an epilogue has a scale of each channel, "
            f"not of each element: add -M 1, or take -F 4, 5 or 6"
        )
    epilogue = Epilogue.of(_MODES[mode])
    if mode in _WITHOUT_ACTIVATION:
        return epilogue
    if activation not in _ACTIVATIONS:
        name = f" ({_REFUSED[activation]})" if activation in _REFUSED else ""
        known = ", ".join(f"{number} {kind}" for number, kind in _ACTIVATIONS.items())
        raise InvalidProblemError(f"--activMode (-m) {activation}{name} is no activation of an epilogue: {known} are")
    return Epilogue(scale=epilogue.scale, bias=epilogue.bias, activation=_ACTIVATIONS[activation])
