"""Earlier names of attributes that strategies, exchanges and policies of other packages may use."""

from typing import Any

_RENAMED = {
    "needs": "measurements",
    "reads": "reported_metrics",
    "learns": "used_next_round",
    "tell": "client_config",
    "FROM_CONFIG": "config_keys",
}
_OTHER = _RENAMED | {new: earlier for earlier, new in _RENAMED.items()}


class EarlierNames:
    """Base of classes with renamed attributes: what a subclass sets by one name has both."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, other in _OTHER.items():
            if name in vars(cls) and other not in vars(cls):
                setattr(cls, other, vars(cls)[name])

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in _OTHER:
            super().__setattr__(_OTHER[name], value)
