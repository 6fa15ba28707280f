"""Talking to a language model: messages, the provider behind them, its cost, and the record of it all.

The client itself, `model.client.OpenAIProvider`, is imported by who needs it: that takes a second.
"""

from workbench.agent.model.budget import BudgetError, Ledger, Limits, Spend, load_prices
from workbench.agent.model.messages import Message, Reply, Request, ToolCall, ToolSpec, Usage
from workbench.agent.model.profile import Profile, load_profile
from workbench.agent.model.provider import ContextOverflowError, ModelError, Provider
from workbench.agent.model.recorded import RecordedProvider, ReplayError
from workbench.agent.model.transcript import Exchange, Transcript

__all__ = [
    "BudgetError",
    "ContextOverflowError",
    "Exchange",
    "Ledger",
    "Limits",
    "Message",
    "ModelError",
    "Profile",
    "Provider",
    "RecordedProvider",
    "ReplayError",
    "Reply",
    "Request",
    "Spend",
    "ToolCall",
    "ToolSpec",
    "Transcript",
    "Usage",
    "load_prices",
    "load_profile",
]
