#!/bin/sh
# The API by hand. Start the server first: octavo serve
set -eu
url=${OCTAVO_URL:-http://127.0.0.1:8000}

echo "== which model?"
curl -sS "$url/v1/models"

printf '\n\n== a chat\n'
curl -sS "$url/v1/chat/completions" -H 'Content-Type: application/json' -d '{
  "messages": [{"role": "user", "content": "What is a page table?"}],
  "max_tokens": 48, "temperature": 0
}'

printf '\n\n== the same, streamed\n'
curl -sSN "$url/v1/chat/completions" -H 'Content-Type: application/json' -d '{
  "messages": [{"role": "user", "content": "What is a page table?"}],
  "max_tokens": 16, "temperature": 0, "stream": true, "stream_options": {"include_usage": true}
}'

printf '== a completion with log-probabilities\n'
curl -sS "$url/v1/completions" -H 'Content-Type: application/json' -d '{
  "prompt": "One, two, three,", "max_tokens": 4, "temperature": 0, "logprobs": 2
}'

printf '\n\n== what is not supported is refused by name\n'
curl -sS "$url/v1/completions" -H 'Content-Type: application/json' -d '{"prompt": "x", "suffix": "y"}'
echo
