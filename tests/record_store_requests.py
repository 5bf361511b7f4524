"""Records the requests of the vendors' own clients for the calls of attached collections.

``python -m tests.record_store_requests`` needs elasticsearch, opensearch-py, pinecone and weaviate-client.

It writes tests/data/store_requests.json. The collections send their requests without these packages, and
``test_remote_collections`` compares them. So a request has the path, the parameters and the body of the vendor's
client.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import numpy as np

from tests.store_servers import Elasticsearch, OpenSearch, Pinecone, Weaviate, serving

FILE = Path(__file__).with_name("data") / "store_requests.json"
DIM, N, K, IDS = 8, 30, 18, ["i001", "i002"]
ALL, EFFORT = {"match_all": {}}, 500
WHOLE = {"allow_partial_search_results": "false"}
VECTOR = [1.0] + [0.0] * (DIM - 1)
GRAPHQL = "{ Aggregate { Docs { meta { count } } } }"


def rows():
    """Rows for a simulated server."""
    X = np.random.default_rng(1).standard_normal((N, DIM))
    return [(f"i{i:03}", x, {"text": f"text {i}"}) for i, x in enumerate(X)]


def page(snapshot):
    """A page of a scan."""
    return {
        "size": 1000,
        "query": {"bool": {"filter": [{"range": {"_seq_no": {"gt": -1}}}]}},
        "sort": [{"_seq_no": "asc"}],
        "pit": {"id": snapshot, "keep_alive": "2m"},
    }


def found_by_id():
    """A search for rows by id."""
    return {"size": len(IDS), "query": {"bool": {"filter": [{"ids": {"values": IDS}}]}}}


def elasticsearch(url):
    """See the module."""
    import elasticsearch as package

    client = package.Elasticsearch(url, api_key="key")
    client.info()
    client.indices.get_mapping(index="docs")
    client.count(index="docs", query=ALL)
    snapshot = client.open_point_in_time(index="docs", keep_alive="2m")["id"]
    client.search(**page(snapshot), **WHOLE)
    client.close_point_in_time(id=snapshot)
    near = {"field": "vector", "query_vector": VECTOR, "k": K, "num_candidates": EFFORT}
    client.search(index="docs", size=K, knn=near, **WHOLE)
    client.search(index="docs", **found_by_id(), **WHOLE)


def opensearch(url):
    """See the module."""
    import opensearchpy

    client = opensearchpy.OpenSearch(url)
    client.info()
    client.indices.get_mapping(index="docs")
    client.count(index="docs", body={"query": ALL})
    snapshot = client.create_pit(index="docs", params={"keep_alive": "2m"})["pit_id"]
    client.search(body=page(snapshot), params=WHOLE)
    client.delete_pit(body={"pit_id": [snapshot]})
    near = {"knn": {"vector": {"vector": VECTOR, "k": EFFORT}}}
    client.search(index="docs", body={"size": K, "query": near}, params=WHOLE)
    client.search(index="docs", body=found_by_id(), params=WHOLE)


def pinecone(url):
    """See the module."""
    from pinecone import Pinecone as Client

    index = Client(api_key="key").Index(host=url)
    index.describe_index_stats()
    index.list_paginated(limit=100)
    index.fetch(ids=[row[0] for row in rows()])
    index.query(vector=VECTOR, top_k=K, include_values=True, include_metadata=True)
    index.fetch(ids=IDS)


def weaviate(url):
    """See the module. The client searches by another protocol (gRPC), so only GraphQL and the schema are recorded."""
    import weaviate as package

    host, port = url.removeprefix("http://").split(":")
    client = package.connect_to_custom(host, int(port), False, host, 1, False, skip_init_checks=True)
    try:
        client.graphql_raw_query(GRAPHQL)
        client.collections.use("Docs").config.get()
    except KeyError:  # the simulated schema has only the properties that the collection reads
        pass
    finally:
        client.close()


PRODUCTS = {
    "elasticsearch": (elasticsearch, Elasticsearch, "elasticsearch"),
    "opensearch": (opensearch, OpenSearch, "opensearch-py"),
    "pinecone": (pinecone, Pinecone, "pinecone"),
    "weaviate": (weaviate, Weaviate, "weaviate-client"),
}


def main() -> None:
    """Records all products."""
    recorded = {}
    for name, (run, kind, package) in PRODUCTS.items():
        with serving(server := kind(rows())) as url:
            run(url)
        recorded[name] = {"client": f"{package} {version(package)}", "requests": server.requests}
    FILE.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main()
