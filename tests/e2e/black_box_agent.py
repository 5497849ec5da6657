"""An agent program that uses OpenAI's client, configured only by environment variables."""

import sys

from openai import OpenAI

client = OpenAI()
answer = client.chat.completions.create(model="gpt-4o", messages=[{"role": "user", "content": sys.argv[1]}])
sys.stdout.write(answer.choices[0].message.content or "")
