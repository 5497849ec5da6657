"""An agent program: OpenAI's client, configured by the environment alone."""

import sys

from openai import OpenAI

client = OpenAI()
answer = client.chat.completions.create(model="gpt-4o", messages=[{"role": "user", "content": sys.argv[1]}])
sys.stdout.write(answer.choices[0].message.content or "")
