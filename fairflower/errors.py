"""The errors that tell a user what to change, as opposed to defects of fairflower."""

from fairflower.config import ConfigError
from fairflower.data import DataError
from fairflower.report.reading import RunError
from fairflower.strategies import RoundFailed

USER_ERRORS = (ConfigError, DataError, RoundFailed, RunError)

__all__ = ["USER_ERRORS", "ConfigError", "DataError", "RoundFailed", "RunError"]
