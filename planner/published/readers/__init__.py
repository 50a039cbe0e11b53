"""Readers of published instances: operator graphs and Piper's layers, both JSON. PipeDream's profiles are models too
(`planner.importers.pipedream`).
"""

from __future__ import annotations

from planner.published.readers.operator_graph import OperatorGraph as OperatorGraph
from planner.published.readers.operator_graph import OperatorNode as OperatorNode
from planner.published.readers.operator_graph import is_operator_graph as is_operator_graph
from planner.published.readers.operator_graph import load_operator_graph as load_operator_graph
from planner.published.readers.operator_graph import operator_graph_from as operator_graph_from
from planner.published.readers.piper import PiperFile as PiperFile
from planner.published.readers.piper import PiperNode as PiperNode
from planner.published.readers.piper import piper_from_document as piper_from_document
from planner.published.readers.piper import read_piper as read_piper
from planner.published.readers.piper import sniff_piper as sniff_piper
