from my_method.data import Stripes
from my_method.strategy import LossPower
from my_method.training import Shallow, Smooth

from fairflower.testing import check_data, check_model, check_strategy, check_trainer


def test_my_method():
    check_strategy(LossPower, power=2.0)
    check_trainer(Smooth, smoothing=0.2)
    check_model(Shallow, hidden=8)
    check_data(Stripes)
