"""The operator's dashboard, which the gateway serves under ``/dashboard``. It works offline, and loads no other host.

One module and one or more templates for each page or group of pages; ``site`` joins them, ``page`` renders, ``records``
reads the event store, ``session`` authenticates. Events, documents and names are untrusted text: only templates, which
escape, produce markup.
"""
