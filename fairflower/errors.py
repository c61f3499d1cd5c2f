"""The errors that tell a user what to change, as opposed to defects of fairflower."""

from fairflower.config import ConfigError
from fairflower.data import DataError
from fairflower.deploy.process import TrialError
from fairflower.report.reading import RunError
from fairflower.strategies import RoundFailed

#: OSError: a folder that cannot be written, a full disk; its text names the path.
USER_ERRORS = (ConfigError, DataError, RoundFailed, RunError, TrialError, OSError)

__all__ = ["USER_ERRORS", "ConfigError", "DataError", "RoundFailed", "RunError", "TrialError"]
