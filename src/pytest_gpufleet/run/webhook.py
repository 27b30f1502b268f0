"""The summary of a run, posted to a site (--fleet-webhook)."""

import os
import time
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

TRIES, TRY_SECONDS, PAUSE_SECONDS = 4, 10.0, 1.0  # each pause is four times the one before
AGAIN = (408, 425, 429, *range(500, 600))  # HTTP statuses that may be another the next time


class NotFollowed(HTTPRedirectHandler):
    """Else a GET without the document would be made of it, and succeed."""

    def redirect_request(self, *args: object) -> None:
        return None


def post(url: str, document: str, key: str, tries: int = TRIES) -> str:
    """Why a document could not be posted; "" if it was. `key`: by which who gets it twice knows that it is the same
    (draft-ietf-httpapi-idempotency-key-header). A bearer token may stand in GPUFLEET_WEBHOOK_TOKEN."""
    headers = {"Content-Type": "application/json", "Idempotency-Key": f'"{key}"'}
    if token := os.environ.get("GPUFLEET_WEBHOOK_TOKEN"):
        headers["Authorization"] = f"Bearer {token}"
    request, opener, why = Request(url, document.encode(), headers), build_opener(NotFollowed), ""
    for number in range(tries):
        time.sleep(PAUSE_SECONDS * 4 ** (number - 1) if number else 0)
        try:
            opener.open(request, timeout=TRY_SECONDS).close()
            return ""
        except HTTPError as error:
            error.close()
            why = f"HTTP status {error.code}"
            if error.code not in AGAIN:
                break
        except (OSError, HTTPException, ValueError) as error:
            why = str(getattr(error, "reason", error))
    return f"{urlsplit(url).hostname}: {why}"  # its path may be a secret
