"""Pure numerical functions that need no messages, files or torch."""

import numpy as np
from numpy.typing import NDArray

#: Floats of any shape, one row for each client or round where there are several.
Vector = NDArray[np.float64]

#: Floats [rows, columns].
Matrix = NDArray[np.float64]
