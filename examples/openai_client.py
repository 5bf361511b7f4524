"""Serves a folder of fictional case notes, guarded, and asks it with the OpenAI client. Needs no network and no key."""

import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from openai import APIConnectionError, OpenAI

from casemate.demo.clinic import case_notes

with TemporaryDirectory() as name, socket.socket() as free:
    folder = Path(name)
    (folder / "notes").mkdir()
    for i, (_, text) in enumerate(case_notes(40)):
        (folder / "notes" / f"{i}.txt").write_text(text[:160])  # short, so that the calibration takes seconds
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
    settings = f"rag: {{corpus: notes}}\ncalibrate: {{questions: 40, documents: 20}}\ngateway: {{port: {port}}}\n"
    (folder / "casemate.yaml").write_text(settings)
    run = (sys.executable, "-m", "casemate")
    subprocess.run([*run, "index"], cwd=folder, check=True)
    made = subprocess.run([*run, "key", "create", "alice"], cwd=folder, check=True, capture_output=True, text=True)
    key = next(word for word in made.stdout.split() if word.startswith("cmk_"))
    free.close()
    server = subprocess.Popen([*run, "serve"], cwd=folder)
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key)
    messages = [{"role": "user", "content": "Who passed tarry stools?"}]
    try:
        while server.poll() is None:  # until it listens
            with suppress(APIConnectionError):
                answer = client.chat.completions.create(model="casemate", messages=messages)
                print(answer.choices[0].message.content)
                break
    finally:
        server.terminate()
        server.wait()
