import type { PageProps } from "../cockpit";
import { RiverView } from "../river/view";

export const RiverPage = ({ run, route }: PageProps) => <RiverView run={run} {...(route.query.get("clients") ? { clients: route.query.get("clients")! } : {})} />;
