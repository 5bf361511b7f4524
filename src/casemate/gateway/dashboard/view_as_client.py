"""The page "View as client": the answer to one question as a client's key would receive it, and why.

Nothing is recorded: no verdict, no cost, no state of the client. The question is in the body of a form, never in an
address, so that no log contains it.
"""

from __future__ import annotations

from typing import Any

from starlette.exceptions import HTTPException

from casemate.errors import BackendError, QueryError
from casemate.gateway.auth.keys import ApiKey, query_of
from casemate.gateway.dashboard.page import Page, PageRequest
from casemate.gateway.dashboard.table import Column
from casemate.guard import verdict_log
from casemate.reports.verdicts import context_rows, reason
from casemate.types import Answer, Query

CONTEXT = (
    Column("Document", lambda row: row["id"], "id"),
    Column("Source", lambda row: row["source"], "source"),
    Column("Similarity", lambda row: row["score"], "score", True),
)


def view(request: PageRequest) -> Page:
    """Builds the page with an empty form. Blocks."""
    return Page("view_as_client.html", _form(request, request.parameter("client"), ""))


async def ask(request: PageRequest) -> Page:
    """Answers the question of the form as a client."""
    chosen, question = request.form.get("client", ""), request.form.get("question", "")
    context = await request.in_thread(_form, request, chosen, question)
    key = next((key for key in context["clients"] if key.id == chosen), None)
    if key is None:
        raise HTTPException(403, "This is not a client key of your tenants. Choose one from the list.")
    query = query_of(key, question, key.id, request.app.config.rag.k)
    try:
        answer = await verdict_log.ask(request.app.unrecorded_target(), query)
        excluded = await request.app.guard.excluded_sources(query)
        labeled = await request.app.guard.label_restricted_sources(query)
    except (QueryError, BackendError) as error:
        return Page("view_as_client.html", context | {"error": str(error)})
    left_out = {"excluded": excluded, "labeled": labeled}
    return Page("view_as_client.html", context | _shown(request, query, answer) | left_out)


def _form(request: PageRequest, chosen: str, question: str) -> dict[str, Any]:
    tenants = request.tenants
    keys = (k for k in request.gateway.keys.all() if k.grant.role == "client" and k.revoked is None)
    clients = [k for k in keys if k.grant.tenant in tenants]
    names = [(key.id, _described(key)) for key in clients]
    return {"clients": clients, "names": names, "chosen": chosen, "question": question, "answer": None, "error": ""}


def _described(key: ApiKey) -> str:
    """A key in a list: names alone may be the same."""
    groups = f"groups {', '.join(key.grant.groups)}" if key.grant.groups else "no groups"
    return f"{key.grant.name} ({key.grant.tenant}), {key.id}, {groups}"


def _shown(request: PageRequest, query: Query, answer: Answer) -> dict[str, Any]:
    policy, mode = request.app.guard.audience, request.app.mode
    rows = [{"id": document, "source": source, "score": score} for document, source, score in context_rows(answer)]
    decisions = [
        {
            "defense": verdict.defense,
            "flagged": verdict.flagged,
            "hidden": verdict.hidden,
            "reason": reason(verdict.defense, verdict.evidence),
        }
        for verdict in answer.verdicts
    ]
    return {
        "answer": answer.text,
        "listing": request.table("Context of the answer", CONTEXT, rows, name="context"),
        "decisions": decisions,
        "unentitled": policy.unentitled,
        "restricted": mode == "enforce" and policy.restricts(query),
        "mode": mode,
    }
