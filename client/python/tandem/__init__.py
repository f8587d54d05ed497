"""Tandem from Python: `Client` submits jobs and follows them; `serve_rewards` offers reward functions to a trainer elsewhere."""

from .client import Client, TandemError
from .reward_function import RewardError, RewardFunction
from .reward_server import RewardServer, serve_rewards

__all__ = ["Client", "RewardError", "RewardFunction", "RewardServer", "TandemError", "serve_rewards"]
