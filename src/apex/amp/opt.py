"""The optimizer that ``handle.wrap_optimizer`` returns, at its path in apex."""

from apex.amp.handle import OptimWrapper as OptimWrapper
from apex.amp.scaler import LossScaler as LossScaler
