"""The operator's pages, served by the gateway itself under ``/dashboard``. They work offline and load nothing foreign.

One file for each page or group of pages; ``site`` joins them, ``page`` is what all look like, ``records`` is what they
show of the event store, ``session`` is who may see them. Whatever comes from events, documents and names is hostile
text: markup is made with ``lab.charts.tag`` only, which escapes.
"""
