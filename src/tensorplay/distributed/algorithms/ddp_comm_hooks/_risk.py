"""How much a hook may change training, in four classes, each with the source that says so."""

__all__ = ["RISKS", "caution_of", "is_allowed", "risk_of"]

RISKS = ("safe", "usually-safe", "check", "risky")
"""From what nearly never matters to what needs a look at the loss."""

_HALF = "half precision on the wire; the mean is rounded once (Micikevicius et al. 2018, section 3)"
_BFLOAT = "8 bits of precision, float32's range (Kalamkar et al. 2019)"
_INT8 = "8 bits a value with error feedback: what is lost is added at the next step (Dettmers et al. 2022)"
_FP8 = "8-bit floats with error feedback (Micikevicius et al. 2022)"
_AFFINE = (
    "8 bits a value without error feedback; one outlier coarsens its bucket or group (Jacob et al. 2018)"
)
_INT4 = "4 bits a value with error feedback; compare the loss with plain all-reduce once (Karimireddy et al. 2019)"
_INT2 = "2 bits a value with error feedback; watch the loss (Karimireddy et al. 2019)"
_SIGN = "1 bit a value; converges with error feedback, but can be slower a step (Karimireddy et al. 2019)"
_TOP = "most values wait in the residual; needs warm-up and tuned momentum (Lin et al. 2018, section 3)"
_RANDOM = "a random share of the values a step; residuals grow large (Stich et al. 2018)"
_LOW_RANK = "a low-rank step with error feedback; rank and start step matter (Vogels et al. 2019, section 4)"

_CLASSES: dict[str, tuple[str, str]] = {
    "allreduce": ("safe", ""),
    "fp32": ("safe", ""),
    "noop": ("risky", "nothing is exchanged: replicas drift apart"),
    "fp16_compress": ("safe", _HALF),
    "fp16": ("safe", _HALF),
    "bf16_compress": ("safe", _BFLOAT),
    "bf16": ("safe", _BFLOAT),
    "int8": ("usually-safe", _INT8),
    "uint8": ("usually-safe", _INT8),
    "fp8_e4m3": ("check", _FP8),
    "fp8_e5m2": ("check", _FP8),
    "quantize_per_tensor": ("risky", _AFFINE),
    "quantize_per_channel": ("risky", _AFFINE),
    "int4": ("check", _INT4),
    "int2": ("risky", _INT2),
    "sign": ("risky", _SIGN),
    "topk": ("risky", _TOP),
    "randomk": ("risky", _RANDOM),
    "power_sgd": ("risky", _LOW_RANK),
    "power_sgd_rank2": ("risky", _LOW_RANK),
    "batched_power_sgd": ("risky", _LOW_RANK),
    "batched_power_sgd_rank2": ("risky", _LOW_RANK),
}
_UNKNOWN = ("risky", "not a hook of this package: its effect on training is not known here")


def risk_of(hook: str) -> str:
    """The class of a hook by name; settings after a colon don't change it.

    Example:
        >>> risk_of("int4:group_size=64"), risk_of("mine:hook")
        ('check', 'risky')
    """
    return _CLASSES.get(hook.partition(":")[0], _UNKNOWN)[0]


def caution_of(hook: str) -> str:
    """One line on accuracy with its source; '' where nothing is lost."""
    return _CLASSES.get(hook.partition(":")[0], _UNKNOWN)[1]


def is_allowed(hook: str, max_risk: str) -> bool:
    """Whether a hook's class is at most `max_risk`.

    Raises: ValueError: `max_risk` is none of RISKS.
    Example:
        >>> is_allowed("int8", "check"), is_allowed("sign", "check")
        (True, False)
    """
    if max_risk not in RISKS:
        raise ValueError(f"max_risk must be one of {', '.join(RISKS)}, got {max_risk!r}")
    return RISKS.index(risk_of(hook)) <= RISKS.index(max_risk)
