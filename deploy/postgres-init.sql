-- The image runs this once, on an empty volume, as the superuser.
CREATE EXTENSION IF NOT EXISTS vector;
