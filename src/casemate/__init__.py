"""Casemate guards a private RAG system, watches it, and attacks it before others do."""

from casemate.errors import BackendError as BackendError
from casemate.errors import CasemateError as CasemateError
from casemate.errors import ConfigError as ConfigError
from casemate.errors import DataError as DataError
from casemate.errors import QueryError as QueryError
from casemate.guard import Guard as Guard
from casemate.protocols import Defense as Defense
from casemate.rag import Rag as Rag
from casemate.types import Action as Action
from casemate.types import Answer as Answer
from casemate.types import Background as Background
from casemate.types import Document as Document
from casemate.types import Hit as Hit
from casemate.types import Outcome as Outcome
from casemate.types import Query as Query
from casemate.types import Reply as Reply
from casemate.types import Retrieval as Retrieval
from casemate.types import Verdict as Verdict
