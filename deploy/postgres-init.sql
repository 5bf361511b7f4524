-- Run once, when the volume is empty, by the superuser that the image makes.
CREATE EXTENSION IF NOT EXISTS vector;
