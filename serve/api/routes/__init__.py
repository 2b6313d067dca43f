"""One file per route; each has `router(state) -> APIRouter`."""
